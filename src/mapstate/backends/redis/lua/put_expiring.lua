-- Behind both guards. ARGV[3] is the expiry in milliseconds, ARGV from 4 on are the values. Replies {1}.

for at = 2, #KEYS do redis.call('SET', KEYS[at], ARGV[at + 2], 'PX', ARGV[3]) end
return {1}

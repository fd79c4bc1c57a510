-- KEYS are hashes, ARGV a field and a value of each. Replies 1.

for at = 1, #KEYS do redis.call('HSET', KEYS[at], ARGV[2 * at - 1], ARGV[2 * at]) end
return 1

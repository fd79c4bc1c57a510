-- Behind fence_guard. KEYS from 2 on are records, ARGV from 2 on their values: "-" removes, "+" stands before a value
-- that replaces. A record that is gone stays gone, and one that expires keeps its time. Replies {1}.

for at = 2, #KEYS do
  if ARGV[at] == '-' then redis.call('DEL', KEYS[at])
  else redis.call('SET', KEYS[at], string.sub(ARGV[at], 2), 'XX', 'KEEPTTL') end
end
return {1}

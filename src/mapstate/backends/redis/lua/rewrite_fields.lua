-- KEYS are hashes, ARGV a field and a value of each: "-" removes, "+" stands before a value that replaces. A field that
-- is gone stays gone. Replies 1.

for at = 1, #KEYS do
  local field, value = ARGV[2 * at - 1], ARGV[2 * at]
  if value == '-' then redis.call('HDEL', KEYS[at], field)
  elseif redis.call('HEXISTS', KEYS[at], field) == 1 then redis.call('HSET', KEYS[at], field, string.sub(value, 2)) end
end
return 1

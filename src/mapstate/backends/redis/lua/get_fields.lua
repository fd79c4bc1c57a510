-- KEYS are hashes, ARGV a field of each. Replies the values.

local found = {}
for at = 1, #KEYS do found[at] = redis.call('HGET', KEYS[at], ARGV[at]) end
return found

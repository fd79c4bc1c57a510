-- Removes all KEYS where the first is at ARGV[1], or gone. Replies 1 or 0.

local found = redis.call('GET', KEYS[1])
if found and found ~= ARGV[1] then return 0 end
for at = 1, #KEYS do redis.call('DEL', KEYS[at]) end
return 1

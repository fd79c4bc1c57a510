-- Behind both guards. ARGV from 3 on are the values of the records. Replies {1}.
-- MSET gets 2000 pairs at a time: Lua's unpack takes at most 8000 values.

local keys, values, pairs, last = KEYS, ARGV, {}, 0
for at = 2, #keys do pairs[last + 1], pairs[last + 2] = keys[at], values[at + 1]; last = last + 2 end
for at = 1, last, 4000 do redis.call('MSET', unpack(pairs, at, math.min(at + 3999, last))) end
return {1}

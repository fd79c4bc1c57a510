-- Behind fence_guard. KEYS from 2 on are records. ARGV[2] is empty, or has a byte for each record: 1 where a get found
-- none. Replies {2, number of the record, its type} where one of those is there now, and is no string. A string that is
-- there may be what an earlier try of this very put has written.
-- EXISTS gets 4000 keys at a time: Lua's unpack takes at most 8000 values.

local absent, names = ARGV[2], {}
for at = 1, #absent do
  if string.byte(absent, at) == 1 then names[#names + 1] = KEYS[at + 1] end
end
local there = 0
for at = 1, #names, 4000 do
  there = there + redis.call('EXISTS', unpack(names, at, math.min(at + 3999, #names)))
end
if there > 0 then
  for at = 1, #absent do
    if string.byte(absent, at) == 1 then
      local kind = redis.call('TYPE', KEYS[at + 1]).ok
      if kind ~= 'none' and kind ~= 'string' then return {2, at, kind} end
    end
  end
end

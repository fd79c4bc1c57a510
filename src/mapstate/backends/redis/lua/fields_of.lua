-- KEYS are hashes. ARGV: the number of the first, how many fields are enough, how many hashes there are.
-- Replies {number of the next hash, 0 at the end; the fields; the KEYS that are no hash}.

local found, other, at = {}, {}, 0
while at < #KEYS and #found < tonumber(ARGV[2]) do
  at = at + 1
  local fields = redis.pcall('HKEYS', KEYS[at])
  if fields.err == nil then
    for _, field in ipairs(fields) do found[#found + 1] = field end
  elseif string.find(fields.err, 'WRONGTYPE', 1, true) then other[#other + 1] = KEYS[at]
  else return fields end
end
local next = ARGV[1] + at
if next >= tonumber(ARGV[3]) then next = 0 end
return {string.format('%d', next), found, other}

-- KEYS: ledger, number of slot groups, claims. ARGV: the ledger before ("": absent) and after, the number of slot groups,
-- and the txid up to which claims go ("": none). Replies 1, or 0 where another ledger was found.

if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[3])
if ARGV[4] ~= '' then
  for _, claim in ipairs(redis.call('HKEYS', KEYS[3])) do
    if tonumber(string.match(claim, '^%d+')) <= tonumber(ARGV[4]) then redis.call('HDEL', KEYS[3], claim) end
  end
end
return 1

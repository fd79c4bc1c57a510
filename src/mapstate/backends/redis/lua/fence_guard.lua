-- KEYS[1] is the fence, ARGV[1] the token that may write.
-- Replies {0, fence} and ends the script where the fence is at another token.

local fence = redis.call('GET', KEYS[1])
if fence ~= ARGV[1] then return {0, fence} end

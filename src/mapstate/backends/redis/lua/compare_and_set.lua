-- Sets KEYS[1], which is never empty, to ARGV[2] where it is at ARGV[1] ("": absent). Replies its value then.

local found = redis.call('GET', KEYS[1])
if (found or '') == ARGV[1] then redis.call('SET', KEYS[1], ARGV[2]); return ARGV[2] end
return found

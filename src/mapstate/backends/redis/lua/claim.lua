-- Sets field ARGV[1] of the hash KEYS[1] to ARGV[2] where it is absent. Replies its value then.

redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2])
return redis.call('HGET', KEYS[1], ARGV[1])

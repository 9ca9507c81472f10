-- Records how much output an execution has given its client. An expired record is not made anew.
--
-- KEYS: 1 the request. ARGV: 1 owner of the execution, 2 tokens of output. Returns 1.
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], 'given:' .. ARGV[1], ARGV[2]) end
return 1

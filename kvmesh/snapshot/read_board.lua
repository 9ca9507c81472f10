-- Reads the board: the latest snapshot of the mesh. The data is returned only if the caller does not know it.
--
-- KEYS: 1 the board, a hash. ARGV: 1 the order that the caller knows, or empty, 2 the most bytes that it reads.
-- Returns {kind, order, size, data}. Kinds: "empty", "known", "data", "junk" (another type, no data, or too many bytes).
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'none' then return {'empty', '', 0, ''} end
if kind ~= 'hash' then return {'junk', '', 0, ''} end
local size = redis.call('HSTRLEN', KEYS[1], 'data')
if redis.call('HSTRLEN', KEYS[1], 'order') > tonumber(ARGV[2]) then return {'junk', '', size, ''} end
local order = redis.call('HGET', KEYS[1], 'order') or ''
if size == 0 or size > tonumber(ARGV[2]) then return {'junk', order, size, ''} end
if order ~= '' and order == ARGV[1] then return {'known', order, size, ''} end
return {'data', order, size, redis.call('HGET', KEYS[1], 'data')}

-- Replaces the override of one scope by compare-and-set, and announces it.
--
-- A version is a time in ms. An override that is made from nothing after Redis lost its memory is therefore newer than
-- the overrides before.
--
-- KEYS: 1 the hash of overrides. ARGV: 1 scope, 2 changes as JSON, 3 channel, 4 the entry to replace, or empty, 5 the
-- least version. Returns the new version, or 0 if the hash has another entry than that of ARGV 4.
redis.replicate_commands()
local found = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if found ~= ARGV[4] then return 0 end
local time = redis.call('TIME')
local version = math.max(time[1] * 1000 + math.floor(time[2] / 1000), tonumber(ARGV[5]))
local entry = '{"version":' .. string.format('%.0f', version) .. ',"changes":' .. ARGV[2] .. '}'
redis.call('HSET', KEYS[1], ARGV[1], entry)
redis.call('PUBLISH', ARGV[3], ARGV[1])
return version

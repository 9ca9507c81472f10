-- Writes the entry of a control process, removes old and unreadable entries, and returns the others.
--
-- KEYS: 1 the hash of entries. ARGV: 1 process id, 2 the entry as JSON without its time and closing brace, 3 life of an
-- entry in ms.
-- Returns the entries, the caller's own one as it was before.
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'hash' and kind ~= 'none' then redis.call('DEL', KEYS[1]) end
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local entries = {}
local rows = redis.call('HGETALL', KEYS[1])
for at = 1, #rows, 2 do
  local is_json, found = pcall(cjson.decode, rows[at + 1])
  local is_entry = is_json and type(found) == 'table' and found.process_id == rows[at]
  local at_ms = is_entry and tonumber(found.at_ms) or 0
  if is_entry and math.abs(now_ms - at_ms) <= tonumber(ARGV[3]) then
    entries[#entries + 1] = rows[at + 1]
  else
    redis.call('HDEL', KEYS[1], rows[at])
  end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. string.format(',"at_ms":%.0f}', now_ms))
redis.call('PEXPIRE', KEYS[1], tonumber(ARGV[3]) * 10)
return entries

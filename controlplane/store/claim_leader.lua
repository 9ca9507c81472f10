-- Claims or renews the leader's lease, and keeps the highest number of a term.
--
-- The lease is taken if there is none, if it is unreadable, or if it is the caller's own (process and boot).
--
-- KEYS: 1 the lease, 2 the highest number. ARGV: 1 the new lease, 2 its life in ms, 3 process id, 4 boot id, 5 number of
-- the caller's term, 0 without one, 6 the largest step of a number that is believed.
-- A stored number is up to 16 digits below 2^53; anything else counts as 0. A leader overwrites a lower number, and one that
-- is more than ARGV 6 above its own.
-- Returns {the lease in force, the highest number as text}.
for at = 1, 2 do
  local kind = redis.call('TYPE', KEYS[at]).ok
  if kind ~= 'string' and kind ~= 'none' then redis.call('DEL', KEYS[at]) end
end

local lease = redis.call('GET', KEYS[1])
local is_free = true
if lease then
  local is_json, holder = pcall(cjson.decode, lease)
  if is_json and type(holder) == 'table' and type(holder.process_id) == 'string' and type(holder.boot_id) == 'string' then
    is_free = holder.process_id == ARGV[3] and holder.boot_id == ARGV[4]
  end
end
local stored = redis.call('GET', KEYS[2]) or ''
local number = #stored <= 16 and string.match(stored, '^%d+$') and tonumber(stored) or 0
if number > 9007199254740991 then number = 0 end
if is_free then
  lease = ARGV[1]
  redis.call('SET', KEYS[1], lease, 'PX', ARGV[2])
  local own = tonumber(ARGV[5])
  if own > number or (own > 0 and number > own + tonumber(ARGV[6])) then
    number = own
    redis.call('SET', KEYS[2], ARGV[5])
  end
end
return {lease, string.format('%.0f', number)}

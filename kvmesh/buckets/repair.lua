-- Repairs the keys of a budget: removes the parts that another program wrote, and keeps all that can be read.
--
-- A key of another type is deleted. A key of the right type loses only the fields that budget.lua cannot read. Slots
-- and open overrun are sums over reservations, so they are added up anew. A deleted reservation counts as swept: its
-- estimate stays charged. Readable levels stay as they are, and debts with them.
--
-- KEYS: as in budget.lua. ARGV: now in ms, as in budget.lua. Returns the number of rows that are left.
redis.replicate_commands()
-- The ledger's indices and its form are those of budget.lua. LEASE_MS: lease of a reservation that has lost its own.
local RESERVED, EXTENDED, SETTLED, REFUNDED, SWEPT = 1, 2, 3, 4, 5
local SWEEPS, LIVE, ROWS, LIFE_EXTENDED = 8, 11, 12, 13
local LEDGER_FORMAT, LEDGER_SIZE, LEASE_MS = '<ddddddddddddd', 104, 15000
local LEVELS, OPEN, LEASES = KEYS[1], KEYS[2], KEYS[3]
local call, sub, pack, read = redis.call, string.sub, struct.pack, struct.unpack
local now = read('<d', ARGV[1])
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

for i, kind in ipairs({'hash', 'hash', 'zset'}) do
  local found = call('TYPE', KEYS[i]).ok
  if found ~= 'none' and found ~= kind then call('UNLINK', KEYS[i]) end
end

-- A level has 24 bytes, with a claim 48.
local pairs_read = call('HGETALL', LEVELS)
for i = 1, #pairs_read, 2 do
  local size = #pairs_read[i + 1]
  if size ~= 24 and size ~= 48 then call('HDEL', LEVELS, pairs_read[i]) end
end

local has_lease, leases_without_row = {}, {}
for _, rid in ipairs(call('ZRANGE', LEASES, 0, -1)) do has_lease[rid], leases_without_row[rid] = true, true end

local ledger, epoch, rows, live, reserved_tokens = nil, nil, 0, 0, 0
-- `slots` by scope. `overruns` by epoch and scope: the open overrun, and the part that quota leases hold free.
local slots, overruns = {}, {}

-- Adds an open reservation to the sums.
local function count_row(text)
  local tokens, _, slots_held = read('<ddd', text, 2)
  local scope_names, overrun, since, free = sub(text, 50), 0, nil, 0
  if sub(text, -26, -25) == '\n~' then
    scope_names = sub(text, 50, -27)
    overrun, since, free = read('<ddd', text, #text - 23)
    overruns[since] = overruns[since] or {}
  end
  live, reserved_tokens = live + 1, reserved_tokens + tokens
  for name in string.gmatch(scope_names, '[^\n]+') do
    slots[name] = (slots[name] or 0) + slots_held
    if since then
      local sum = overruns[since][name] or {0, 0}
      overruns[since][name] = {sum[1] + overrun, sum[2] + free}
    end
  end
end

pairs_read = call('HGETALL', OPEN)
for i = 1, #pairs_read, 2 do
  local name, text = pairs_read[i], pairs_read[i + 1]
  local prefix, state = sub(name, 1, 1), sub(text, 1, 1)
  if name == '+' and (#text == LEDGER_SIZE or #text == LEDGER_SIZE + 8) then
    ledger = {read(LEDGER_FORMAT, text)}
    epoch = #text > LEDGER_SIZE and read('<d', text, LEDGER_SIZE + 1) or nil
  elseif prefix == '#' then
    call('HDEL', OPEN, name)
  elseif name ~= '+' and (text == 's' or ((state == 'o' or state == 'w') and #text >= 49)) then
    rows, leases_without_row[name] = rows + 1, nil
    if state == 'o' then count_row(text) end
    if not has_lease[name] then call('ZADD', LEASES, state == 'o' and now + LEASE_MS or now, name) end
  else
    call('HDEL', OPEN, name)
  end
end
for rid in pairs(leases_without_row) do call('ZREM', LEASES, rid) end
if rows == 0 and not ledger then return 0 end

if not ledger then
  ledger = {reserved_tokens, 0, 0, 0, 0, 0, 0, 0, 0, 0, live, 0, 0}
  for since in pairs(overruns) do epoch = math.max(epoch or since, since) end
end
-- The tokens of deleted reservations close the ledger's sum as swept.
local unaccounted = ledger[RESERVED] + ledger[EXTENDED] - ledger[SETTLED] - ledger[REFUNDED] - ledger[SWEPT]
  - reserved_tokens
ledger[SWEPT], ledger[SWEEPS] = ledger[SWEPT] + unaccounted, ledger[SWEEPS] + ledger[LIVE] - live
ledger[LIVE], ledger[ROWS], ledger[LIFE_EXTENDED] = live, rows, 0
call('HSET', OPEN, '+', pack(LEDGER_FORMAT, unpack(ledger, 1, LIFE_EXTENDED)) .. (epoch and pack('<d', epoch) or ''))
for name, number in pairs(slots) do call('HSET', OPEN, '#' .. name, number) end
for name, sum in pairs(epoch and overruns[epoch] or {}) do
  call('HSET', OPEN, '#~' .. name, pack('<ddd', sum[1], epoch, sum[2]))
end
return rows

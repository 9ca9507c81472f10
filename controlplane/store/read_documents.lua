-- Reads the documents of the control plane. Documents that the caller knows are not sent.
--
-- KEYS: 1 the hash of rollouts, 2 the desired document. ARGV: name and stamp (revision and digest) of each document that the caller knows.
-- The desired document has an empty name.
-- Returns for each document its name, its revision as text, and its value; an empty value for a known stamp.
local known = {}
for at = 1, #ARGV, 2 do known[ARGV[at]] = ARGV[at + 1] end
local found = {}

local function add(name, value)
  local revision, digest = string.match(value, '^{"revision":(%d+),"digest":"(%x+)",')
  local is_known = revision and known[name] == revision .. '.' .. digest
  found[#found + 1] = name
  found[#found + 1] = revision or '0'
  found[#found + 1] = is_known and '' or value
end

if redis.call('TYPE', KEYS[1]).ok == 'hash' then
  local rows = redis.call('HGETALL', KEYS[1])
  for at = 1, #rows, 2 do
    if rows[at] ~= '' then add(rows[at], rows[at + 1]) end
  end
end
if redis.call('TYPE', KEYS[2]).ok == 'string' then add('', redis.call('GET', KEYS[2])) end
return found

-- Appends a contiguous batch to a stream's log, each position once.
-- KEYS: log, meta. ARGV: origin, term, length limit, first position, entries…
-- Replies {status, text}: OK last | FOREIGN origin | STALE term | CLOSED 0 | GAP last.
local origin, term = redis.call('HGET', KEYS[2], 'origin'), redis.call('HGET', KEYS[2], 'term')
if not origin then return {'CLOSED', '0'} end
if origin ~= ARGV[1] then return {'FOREIGN', origin} end
if tonumber(term) > tonumber(ARGV[2]) then return {'STALE', term} end
-- An older term than ours: the server went back to a time before we opened the log.
if tonumber(term) < tonumber(ARGV[2]) then return {'CLOSED', '0'} end

local first = tonumber(ARGV[4])
local final = first + #ARGV - 5
local tail = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
local last
if #tail > 0 then
  last = tonumber(string.match(tail[1][1], '^(%d+)%-0$'))
  if not last then
    -- Not an id of ours, and no entry of ours fits behind it in its place.
    redis.call('DEL', KEYS[1])
    return {'CLOSED', '0'}
  end
  if first > last + 1 then return {'GAP', string.format('%.0f', last)} end
else
  -- Without an entry the log starts at the base recorded with this term, and nowhere else.
  last = tonumber(redis.call('HGET', KEYS[2], 'base'))
  if first ~= last + 1 then return {'CLOSED', '0'} end
end

-- The script stops at its first error, so the log has no gap whatever happens here.
for position = last + 1, final do
  local added = redis.pcall(
    'XADD', KEYS[1], string.format('%.0f-0', position), 'e', ARGV[position - first + 5])
  if type(added) == 'table' and added.err then
    -- The key remembers a larger id than its last entry: somebody removed our tail, and only a
    -- new key accepts these positions again. The caller fills it from PostgreSQL.
    if position == last + 1 and string.find(added.err, 'equal or smaller', 1, true) then
      redis.call('DEL', KEYS[1])
      return {'CLOSED', '0'}
    end
    return added
  end
end
redis.call('XTRIM', KEYS[1], 'MAXLEN', '~', ARGV[3])
return {'OK', string.format('%.0f', math.max(last, final))}

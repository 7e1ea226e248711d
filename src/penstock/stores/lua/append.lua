-- Appends a contiguous batch to a stream's log, each position once. A single entry that covers more
-- than one position is a hole, and stands at its last.
-- KEYS: log, meta. ARGV: origin, incarnation, term, length limit, limit in bytes or 0 where it is
-- not to be looked at, first and last position, entries…
-- Replies {status, text}: OK last | FOREIGN origin | STALE term | CLOSED 0 | GAP last.
local meta = redis.call('HMGET', KEYS[2], 'origin', 'incarnation', 'term', 'seen')
local origin, incarnation, term = meta[1], meta[2], meta[3]
if not origin then return {'CLOSED', '0'} end
if origin ~= ARGV[1] then return {'FOREIGN', origin} end
-- A standby took over since, and may count the same terms again.
if incarnation ~= ARGV[2] then return {'CLOSED', '0'} end
if tonumber(term) > tonumber(ARGV[3]) then return {'STALE', term} end
-- An older term than ours: the server went back to a time before we opened the log.
if tonumber(term) < tonumber(ARGV[3]) then return {'CLOSED', '0'} end

local first, final = tonumber(ARGV[6]), tonumber(ARGV[7])
local is_hole = final - first > #ARGV - 8
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
for position = is_hole and math.max(final, last + 1) or last + 1, final do
  local id, entry = string.format('%.0f-0', position), ARGV[is_hole and 8 or position - first + 8]
  local added
  if position < final then
    added = redis.pcall('XADD', KEYS[1], id, 'e', entry)
  else
    added = redis.pcall('XADD', KEYS[1], 'MAXLEN', '~', ARGV[4], id, 'e', entry)
  end
  if type(added) == 'table' and added.err then
    -- The key remembers a larger id than its last entry: somebody removed our tail, and only a
    -- new key accepts these positions again. The caller fills it from PostgreSQL.
    if (is_hole or position == last + 1)
        and string.find(added.err, 'equal or smaller', 1, true) then
      redis.call('DEL', KEYS[1])
      return {'CLOSED', '0'}
    end
    return added
  end
end

if tonumber(ARGV[5]) > 0 then
  -- Whoever may not ask for the size has the limit in length alone.
  local size = redis.pcall('MEMORY', 'USAGE', KEYS[1])
  if type(size) == 'number' and size > tonumber(ARGV[5]) * 7 / 8 then
    local keep = redis.call('XLEN', KEYS[1]) * (tonumber(ARGV[5]) * 3 / 4 / size)
    redis.call('XTRIM', KEYS[1], 'MAXLEN', '~', math.max(1, math.floor(keep)))
  end
end
local now = redis.call('TIME')[1]
if now ~= meta[4] then redis.call('HSET', KEYS[2], 'seen', now) end
return {'OK', string.format('%.0f', math.max(last, final))}

-- Opens a stream's log for a term, at a base from which an empty log may start.
-- KEYS: log, meta. ARGV: origin, incarnation (cluster/database/timeline), term, base, seconds for
-- which a publisher that was seen counts as alive.
-- Replies {status, last}: OK last (-1: empty) | FOREIGN origin | COPY incarnation | STALE term.
local meta = redis.call('HMGET', KEYS[2], 'origin', 'term', 'incarnation', 'seen')
local origin, term, incarnation, seen = meta[1], meta[2], meta[3], meta[4]
local now = tonumber(redis.call('TIME')[1])
if origin and origin ~= ARGV[1] then return {'FOREIGN', origin} end
if incarnation and incarnation ~= ARGV[2] then
  -- The same origin in another place is a copy of the database. Only a standby that took over, on a
  -- later timeline of the same cluster, is its heir, once nobody writes here any more.
  local is_heir = string.match(incarnation, '^(.*/)') == string.match(ARGV[2], '^(.*/)')
    and incarnation < ARGV[2]
  if not is_heir or (seen and now - tonumber(seen) < tonumber(ARGV[5])) then
    return {'COPY', incarnation}
  end
  -- Its terms are counted anew: the heir may have lost the last ones.
elseif term and tonumber(term) > tonumber(ARGV[3]) then
  return {'STALE', term}
end
redis.call('HSET', KEYS[2], 'origin', ARGV[1], 'incarnation', ARGV[2], 'term', ARGV[3],
  'base', ARGV[4], 'seen', now)
local tail = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
local last = #tail > 0 and string.match(tail[1][1], '^(%d+)%-0$')
if last then return {'OK', last} end
-- Empty, but the key may remember a larger id than we want to start with (XTRIM to nothing, XDEL);
-- or its tail is not an id of ours.
redis.call('DEL', KEYS[1])
return {'OK', '-1'}

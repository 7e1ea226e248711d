-- Opens a stream's log for a term, at a base from which an empty log may start.
-- KEYS: log, meta. ARGV: origin, term, base.
-- Replies {status, last}: OK last (-1: empty) | FOREIGN origin | STALE term.
local origin, term = redis.call('HGET', KEYS[2], 'origin'), redis.call('HGET', KEYS[2], 'term')
if origin and origin ~= ARGV[1] then return {'FOREIGN', origin} end
if term and tonumber(term) > tonumber(ARGV[2]) then return {'STALE', term} end
redis.call('HSET', KEYS[2], 'origin', ARGV[1], 'term', ARGV[2], 'base', ARGV[3])
local tail = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
local last = #tail > 0 and string.match(tail[1][1], '^(%d+)%-0$')
if last then return {'OK', last} end
-- Empty, but the key may remember a larger id than we want to start with (XTRIM to nothing, XDEL);
-- or its tail is not an id of ours.
redis.call('DEL', KEYS[1])
return {'OK', '-1'}

-- Throws a stream's log away; it starts again after the base, in the same term.
-- KEYS: log, meta. ARGV: origin, incarnation, term, base.
-- Replies {status, text}: OK base | FOREIGN origin | STALE term | CLOSED 0.
local meta = redis.call('HMGET', KEYS[2], 'origin', 'incarnation', 'term')
local origin, incarnation, term = meta[1], meta[2], meta[3]
if not origin then return {'CLOSED', '0'} end
if origin ~= ARGV[1] then return {'FOREIGN', origin} end
if incarnation ~= ARGV[2] then return {'CLOSED', '0'} end
if tonumber(term) > tonumber(ARGV[3]) then return {'STALE', term} end
if tonumber(term) < tonumber(ARGV[3]) then return {'CLOSED', '0'} end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[2], 'base', ARGV[4])
return {'OK', ARGV[4]}

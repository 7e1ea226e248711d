-- Throws a stream's log away; it starts again after the base, in the same term.
-- KEYS: log, meta. ARGV: origin, term, base.
-- Replies {status, text}: OK base | FOREIGN origin | STALE term | CLOSED 0.
local origin, term = redis.call('HGET', KEYS[2], 'origin'), redis.call('HGET', KEYS[2], 'term')
if not origin then return {'CLOSED', '0'} end
if origin ~= ARGV[1] then return {'FOREIGN', origin} end
if tonumber(term) > tonumber(ARGV[2]) then return {'STALE', term} end
if tonumber(term) < tonumber(ARGV[2]) then return {'CLOSED', '0'} end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[2], 'base', ARGV[3])
return {'OK', ARGV[3]}

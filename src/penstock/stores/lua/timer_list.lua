-- A page of timers with what is known of their leases, as of one moment.
-- KEYS: timeline and, if it is asked for, state. ARGV: lowest score, highest score, how many to skip, count.
-- Returns id, score, state ('' for none), one after the other.

local listed = {}
local found = redis.call('ZRANGEBYSCORE', KEYS[1], ARGV[1], ARGV[2], 'WITHSCORES',
  'LIMIT', ARGV[3], ARGV[4])
for i = 1, #found, 2 do
  listed[#listed + 1] = found[i]
  listed[#listed + 1] = found[i + 1]
  listed[#listed + 1] = KEYS[2] and redis.call('HGET', KEYS[2], found[i]) or ''
end
return listed

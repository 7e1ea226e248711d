-- What is known of a topic's dead timers, without their payloads, which may be large.
-- KEYS: dead. ARGV: count. Returns id, heading (four lines), one after the other.

local listed, cursor = {}, '0'
repeat
  local page = redis.call('HSCAN', KEYS[1], cursor, 'COUNT', 100)
  cursor = page[1]
  for i = 1, #page[2], 2 do
    listed[#listed + 1] = page[2][i]
    listed[#listed + 1] = string.match(page[2][i + 1], '^[^\n]*\n[^\n]*\n[^\n]*\n[^\n]*\n') or ''
    if #listed >= 2 * tonumber(ARGV[1]) then return listed end
  end
until cursor == '0'
return listed

/* Membership of a fleet: three supervisors that write a record in each third of a heartbeat (a tick), and read those of the
 * others right after it; who has a table follows from who each of them takes for living. They are killed, stopped,
 * suspended and started at any moment, and at times the store of the fleet cannot be written.
 *
 * One table: of those that a member takes for living, itself included, the one of the lowest number has it. (Rendezvous
 * hashing gives each table such an order.) In each tick each member that runs acts once, in any order. A record's number
 * is not modelled, but whether a member has read it: fresh. Only a member that could write its own record judges others.
 * An outage begins in calm times: its edges are where one member still writes, or writes again, and another one does not.
 *
 * In every state:
 *   after CALM ticks without any event, the table has exactly one member, if there is one that runs
 *   after CALM ticks in which members were started at most, it has one at least: a member that joins leaves no gap
 *   while the store is away and after it, the member that had the table has it, and no other one
 *
 * Planted bugs (-DBUG=n):
 *   1  a member that cannot write its record judges the others by theirs, which they cannot write either
 *   2  a time without readings counts: after an outage, a member takes all for dead that have not written since
 *   3  a member announces itself before it knows who lives: it leaves tables to a dead one
 *   4  a member without a new record is dead at the next reading
 *   5  a member that was dead stays so when it writes again
 *   6  readings that are a heartbeat apart count: after a short outage, one that missed a write on each side of it is dead
 */
#ifndef BUG
#define BUG 0
#endif
#define N 3
#if BUG == 4
#define DEAD 1
#else
#define DEAD 5                                  /* ticks: one and a half heartbeats */
#endif
#if BUG == 6
#define GAP 3
#else
#define GAP 2                                   /* ticks without a reading after which nobody is dead yet */
#endif
#define NEVER (GAP + 2)
#define CALM 8
#ifdef SHORT
#define EVENTS 4
#else
#define EVENTS 5
#endif
#define NONE 3
#define AWAY 0
#define WATCH 1
#define IN 2
#define AT(o) (m * N + o)

byte status[N];                                 /* of a process; AWAY: none runs */
bool suspended[N], record[N], acted[N];
bool known[9], fresh[9], living[9], proven[9];  /* what a member (m) knows of another one (o), at AT(o) */
byte age[9], idle[N];                           /* ticks: since the newest record was first read; since the last reading */
bool down;
byte calm, quiet, had = NONE, events, x, y, m;

#define RUNS(i) (status[i] != AWAY && !suspended[i])
#define FIRST(i) (!(i > 0 && living[i * N]) && !(i > 1 && living[i * N + 1]))
#define HAS(i) (status[i] == IN && !suspended[i] && FIRST(i))
#define COUNT (HAS(0) + HAS(1) + HAS(2))
#define SOME ((status[0] == IN && !suspended[0]) || (status[1] == IN && !suspended[1]) || (status[2] == IN && !suspended[2]))

inline event() { calm = 0; had = NONE; events++ }
inline disturb() { event(); quiet = 0 }

inline look() {
    x = 0;
    do
    :: x < N && x != m ->
       if
       :: !record[x] -> known[AT(x)] = false; living[AT(x)] = false; proven[AT(x)] = false; age[AT(x)] = 0
       :: record[x] && (!known[AT(x)] || fresh[AT(x)]) ->
#if BUG == 5
          if :: !known[AT(x)] || living[AT(x)] -> living[AT(x)] = true; proven[AT(x)] = idle[m] != NEVER :: else fi;
#else
          living[AT(x)] = true; proven[AT(x)] = idle[m] != NEVER;
#endif
          known[AT(x)] = true; age[AT(x)] = 0
#if BUG != 2
       :: record[x] && known[AT(x)] && !fresh[AT(x)] && idle[m] > GAP -> age[AT(x)] = 0
       :: record[x] && known[AT(x)] && !fresh[AT(x)] && idle[m] <= GAP ->
#else
       :: record[x] && known[AT(x)] && !fresh[AT(x)] ->
#endif
          if :: age[AT(x)] >= DEAD -> living[AT(x)] = false; proven[AT(x)] = false; age[AT(x)] = 0 :: else fi
       fi; fresh[AT(x)] = false; x++
    :: x < N && x == m -> x++
    :: x == N -> break
    od; x = 0; idle[m] = 0
}
inline announce() { record[m] = true; fresh[m] = m != 0; fresh[N + m] = m != 1; fresh[2 * N + m] = m != 2 }
inline act() {
    acted[m] = true;
    if
    :: down && BUG != 1 -> skip
    :: down && BUG == 1 -> if :: status[m] == IN -> look() :: else fi
    :: !down && status[m] == IN -> announce(); look()
    :: !down && status[m] == WATCH ->
       look();
       if
#if BUG == 3
       :: true -> status[m] = IN; announce()
#else
       :: (m == 0 || !living[AT(0)] || proven[AT(0)]) && (m == 1 || !living[AT(1)] || proven[AT(1)]) && (m == 2 || !living[AT(2)] || proven[AT(2)]) ->
          status[m] = IN; announce()
       :: else
#endif
       fi
    fi; m = 0
}
inline forget() {
    x = 0;
    do
    :: x < N -> known[AT(x)] = false; fresh[AT(x)] = false; living[AT(x)] = false; proven[AT(x)] = false; age[AT(x)] = 0; x++
    :: else -> break
    od; x = 0; idle[m] = NEVER
}
inline tick() {
    assert(calm < CALM || down || !SOME || COUNT == 1);
    assert(quiet < CALM || down || !SOME || COUNT >= 1);
    if :: had != NONE -> assert(COUNT == 1 && HAS(had)) :: else fi;
    x = 0;
    do
    :: x < N ->
       acted[x] = false;
       if :: status[x] != AWAY && idle[x] < GAP + 1 -> idle[x]++ :: else fi;
       y = 0;
       do
       :: y < N -> if :: known[x * N + y] && living[x * N + y] && age[x * N + y] < DEAD -> age[x * N + y]++ :: else fi; y++
       :: else -> break
       od; x++
    :: else -> break
    od; x = 0; y = 0;
    if :: !down && calm < CALM -> calm++ :: else fi;
    if :: !down && quiet < CALM -> quiet++ :: else fi
}

active proctype Fleet() {
    do
    :: d_step { RUNS(0) && !acted[0] -> m = 0; act() }
    :: d_step { RUNS(1) && !acted[1] -> m = 1; act() }
    :: d_step { RUNS(2) && !acted[2] -> m = 2; act() }
    :: d_step { (!RUNS(0) || acted[0]) && (!RUNS(1) || acted[1]) && (!RUNS(2) || acted[2]) -> tick() }
    :: events < EVENTS -> if :: m = 0 :: m = 1 :: m = 2 fi;
       if
       :: d_step { status[m] == AWAY -> status[m] = WATCH; forget(); event() }                               /* started */
       :: d_step { status[m] != AWAY && !suspended[m] -> status[m] = AWAY; forget(); disturb() }             /* killed */
       :: d_step { status[m] == IN && !suspended[m] && !down -> record[m] = false; status[m] = AWAY; forget(); disturb() } /* stopped */
       :: d_step { status[m] == IN && !suspended[m] -> suspended[m] = true; disturb() }
       :: d_step { suspended[m] -> suspended[m] = false; disturb() }
       :: d_step { !down && calm == CALM -> down = true; calm = 0; quiet = 0; events++;
             had = (COUNT == 1 -> (HAS(0) -> 0 : (HAS(1) -> 1 : 2)) : NONE) }
       :: d_step { down -> down = false; calm = 0; quiet = 0 }
       fi; m = 0
    od
}

/* A Zeppelin namespace: two writers that append, two compactors with leases and fencing tokens, gc with deferred deletes,
 * two readers. Any process may stall at any step, be taken for dead, and resume (a zombie).
 *
 * One object, the manifest, lists fragments and a segment, and is replaced by compare-and-swap: fresh has a bit for each
 * process that has read it as it is. A lease may end at any time, whatever its holder does; the next one has a higher token.
 * content[s] is the set of fragments whose rows segment s has; segment 0 is empty. A fragment is acknowledged once the
 * manifest lists it; from then on it is listed, or in the segment that is (check).
 *
 * gc waits for --reader-grace: here, no reader uses a manifest with the object.
 *
 * Searched in parts:
 *   A  safety, as above; a lease has no duration
 *   B  liveness: two compactors, their heartbeats and a clock. One compactor may die at any step; from some moment on, time
 *      passes no faster than those that live make their heartbeats. Under weak fairness what is to be compacted is, in the
 *      end; a run that lives keeps its lease; none publishes after another one has claimed
 *
 * Planted bugs (-DBUG=n), each with its part:
 *   1  (A) a compactor puts its token into the manifest with its result, and checks only that there is no later one
 *   2  (A) a compaction clears all fragments that are listed, not exactly those that it read
 *   3  (A) the lease was deleted, and the next token is 1 again
 *   4  (A) gc deletes a segment that no manifest lists, and puts no token into the manifest before
 *   5  (A) gc deletes a fragment that no manifest lists, and does not replace the manifest before
 *   6  (A) gc deletes what a compaction removed while a reader uses the manifest before
 *   7  (A) the manifest is replaced without a condition
 *   8  (A) gc does not read the manifest again before it deletes
 *   9  (B) the heartbeat goes on after its run died: no other one gets the lease
 *   10  (B) a lease is renewed once in its time: when one renewal fails, the run that lives loses it
 *   11  (B) a run publishes by its lease alone, and does not read the manifest's token
 *   12  (B) a renewal that fails counts as a lost lease: run after run ends before it publishes
 */
#ifndef BUG
#define BUG 0
#endif
#ifdef PART_B
/* One lease, renewed by a heartbeat in each third of its time. Tokens are used by their order alone: these are ranks. */
#if BUG == 10
#define TTL 1
#else
#define TTL 3
#endif
byte lease, left;                               /* the newest lease: its token, and the thirds that are left of it */
byte token;                                     /* in the manifest */
byte held[2];                                   /* the token of each run; 0: it has none */
bool due[2], failed[2], lost[2];                /* heartbeats: to be made in this third; the last one failed; the lease is another's */
bool dead[2], backlog;
bool calm, timely;                              /* the lease was acquired or renewed since */
#define LIVES(i) (held[i] && !dead[i])
#define BEATS(i) (due[i] && LIVES(i))
#define KEEPS(i) (timely && LIVES(i) && held[i] == lease)

inline rank() {
    x = 1;
    do
    :: x < 5 && (lease == x || token == x || held[0] == x || held[1] == x) -> x++
    :: x < 5 && !(lease == x || token == x || held[0] == x || held[1] == x) ->
       if :: lease > x -> lease-- :: else fi; if :: token > x -> token-- :: else fi;
       if :: held[0] > x -> held[0]-- :: else fi; if :: held[1] > x -> held[1]-- :: else fi; break
    :: else -> break
    od; x = 0
}
inline acquire() {
    assert(!KEEPS(0) && !KEEPS(1));             /* a run that lives keeps its lease */
    lease = 1 + (lease > token -> lease : token); left = TTL; timely = calm
}

active [2] proctype Compactor() {
    byte x; bool claimed;
    do
    :: d_step { backlog && !left && !held[_pid] && !dead[_pid] -> acquire(); held[_pid] = lease; due[_pid] = false; rank() }
    :: d_step { backlog && !left && !held[_pid] && !dead[_pid] && !calm -> acquire(); rank() }      /* its response is lost */
    :: d_step { LIVES(_pid) && !claimed && token < held[_pid] -> token = held[_pid]; claimed = true; rank() }
#if BUG == 11
    :: d_step { LIVES(_pid) && claimed -> assert(token == held[_pid]);
#else
    :: d_step { LIVES(_pid) && claimed && token == held[_pid] ->
#endif
          backlog = false };
       d_step { !dead[_pid] -> if :: lease == held[_pid] -> left = 0 :: else fi; held[_pid] = 0; claimed = false; lost[_pid] = false; rank() }
    :: d_step { LIVES(_pid) && (lost[_pid] || token > held[_pid]) -> held[_pid] = 0; claimed = false; lost[_pid] = false; rank() }
    od
}

/* A renewal may fail, but no two in a row. */
active [2] proctype Heartbeat() {
    do
#if BUG == 9
    :: atomic { due[_pid - 2] && held[_pid - 2] && !lost[_pid - 2] ->
#else
    :: atomic { BEATS(_pid - 2) ->
#endif
          due[_pid - 2] = false;
          if
          :: lease != held[_pid - 2] -> lost[_pid - 2] = true
          :: lease == held[_pid - 2] -> left = TTL; failed[_pid - 2] = false; timely = calm
          :: !failed[_pid - 2] -> failed[_pid - 2] = true
#if BUG == 12
             ; lost[_pid - 2] = true
#endif
          fi }
    od
}

/* Time passes at will; after calm, in each third every run that lives makes its heartbeat. */
active proctype Clock() {
    do :: d_step { left && !(calm && (BEATS(0) || BEATS(1))) -> left--; due[0] = (held[0] != 0); due[1] = (held[1] != 0) } od
}
active proctype Calm() { calm = true }
active proctype Death() { if :: dead[0] = true :: dead[1] = true :: true fi }       /* at any step, of one at most */
active proctype Writer() { do :: !backlog -> backlog = true od }

ltl ends { [] (backlog -> <> !backlog) }

#else
#if defined(SHORT) || BUG
#define READERS 1
#else
#define READERS 2
#endif
#define F 2                 /* fragments 1 to F */
#define S 2                 /* segments 1 to S */
#define T 3                 /* tokens 1 to T */
#define BIT(n) (1 << (n))
#define MINUS(set, n) (set & (255 - BIT(n)))

byte token, listed, segment;                    /* the manifest */
byte fresh;
byte lease;                                     /* the token of the newest lease */
byte fragments, segments = 1, content[S+1];     /* objects that exist, a bit each */
byte names, made;                               /* fragments and segments that were ever begun, by number */
byte acked;
byte old;                                       /* fragments that were put days ago, a bit each: gc plans no others */
byte usesF[2], usesS[2];                        /* what readers have in use */

inline check() {
    assert(!(acked & (255 - (listed | content[segment]))));
    assert(!(listed & (255 - fragments)) && segments & BIT(segment))
}
#if BUG == 7
#define WON true
#else
#define WON (fresh & BIT(_pid))
#endif

active [2] proctype Writer() {
    byte f;
    do
    :: d_step { !f && names < F -> names++; f = names; fragments = fragments | BIT(f); fresh = fresh | BIT(_pid) }   /* reads, then puts it */
    :: d_step { f -> if :: WON -> listed = listed | BIT(f); acked = acked | BIT(f); fresh = 0; check(); f = 0 :: else fi;
          /* Another process replaced the manifest: it reads it again, or puts another fragment, if that one is an hour old. */
          if :: f && !(old & BIT(f)) -> fresh = fresh | BIT(_pid) :: else -> f = 0 fi }
    od
}

active [2] proctype Compactor() {
    byte t, read, from, s;
    do
    :: d_step { lease < T -> lease++; t = lease }
#if BUG == 3
    :: d_step { lease == 2 -> lease = 1; t = 1 }
#endif
    :: t ->
#if BUG != 1
       d_step { if :: token < t -> token = t; fresh = 0 :: token > t -> t = 0 :: else fi };   /* claim: retried until it wins */
#endif
       if
       :: d_step { t && made < S && listed -> read = listed; from = segment; made++; s = made };
          d_step { content[s] = content[from] | read; segments = segments | BIT(s) };
          d_step {                                          /* each attempt reads the manifest again */
             if
#if BUG == 1
             :: token <= t -> fresh = fresh | BIT(_pid)
#else
             :: token == t && segment == from && !(read & (255 - listed)) -> fresh = fresh | BIT(_pid)
#endif
             :: else -> t = 0
             fi };
          d_step {
             if
             :: t && WON ->
#if BUG == 2
                listed = 0;
#else
                listed = listed & (255 - read);
#endif
                segment = s; token = t; fresh = 0; check()
             :: else
             fi; read = 0; from = 0; s = 0 }
       :: else
       fi; t = 0
    od
}

/* They are alike: a state in which two of them have changed places is stored once. */
inline order() {
    if
    :: usesS[0] < usesS[1] || (usesS[0] == usesS[1] && usesF[0] < usesF[1]) ->
       x = usesS[0]; usesS[0] = usesS[1]; usesS[1] = x; x = usesF[0]; usesF[0] = usesF[1]; usesF[1] = x; x = 0
    :: else
    fi
}
active proctype Readers() {
    byte i, x;
    do
    :: atomic { i = 0; do :: i + 1 < READERS -> i++ :: break od;
       d_step {
          if
          :: !usesS[i] -> usesF[i] = listed; usesS[i] = segment + 1
          :: else -> assert(!(usesF[i] & (255 - fragments)) && segments & BIT(usesS[i] - 1)); usesF[i] = 0; usesS[i] = 0
          fi; i = 0; order() } }
    od
}

#if BUG == 6
#define USED_F(f) false
#define USED_S(s) false
#else
#define USED_F(f) ((usesF[0] | usesF[1]) & BIT(f))
#define USED_S(s) (usesS[0] == s + 1 || usesS[1] == s + 1)
#endif
active proctype Gc() {
    byte f, s, k; bool retired;
    do
    :: atomic { f = 1; do :: f < F -> f++ :: break od; if :: fragments & BIT(f) && !(listed & BIT(f)) -> old = old | BIT(f) :: else -> f = 0 fi };
       if
       :: f ->
#if BUG != 5
          d_step { if :: !(acked & BIT(f)) -> fresh = 0 :: else fi };   /* an orphan: the manifest is replaced */
#endif
          d_step { if
#if BUG != 8
             :: listed & BIT(f)
#endif
             :: else -> if :: !USED_F(f) -> fragments = MINUS(fragments, f); check() :: else fi fi; f = 0 }
       :: else
       fi
    :: atomic { s = 1; do :: s < S -> s++ :: break od; if :: segments & BIT(s) && s != segment :: else -> s = 0 fi };
       if
       :: s ->
#if BUG != 4
          d_step { lease < T -> lease++; token = lease; fresh = 0 };    /* a lease of its own; its token is put in */
#endif
          d_step { if
#if BUG != 8
             :: s == segment
#endif
             :: else -> if :: !USED_S(s) -> segments = MINUS(segments, s); check() :: else fi fi; s = 0 }
       :: else
       fi
    od
}
#endif

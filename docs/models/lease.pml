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
 * Planted bugs (-DBUG=n):
 *   1  a compactor puts its token into the manifest with its result, and checks only that there is no later one
 *   2  a compaction clears all fragments that are listed, not exactly those that it read
 *   3  the lease was deleted, and the next token is 1 again
 *   4  gc deletes a segment that no manifest lists, and puts no token into the manifest before
 *   5  gc deletes a fragment that no manifest lists, and does not replace the manifest before
 *   6  gc deletes what a compaction removed while a reader uses the manifest before
 *   7  the manifest is replaced without a condition
 *   8  gc does not read the manifest again before it deletes
 */
#ifndef BUG
#define BUG 0
#endif
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

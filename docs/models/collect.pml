/* Collection: gc, step by step, against writers that claim and stall, mergers, readers without leases, tags, holds, restores,
 * expiry, and a region that is used again.
 *
 * One region. A generation is flushed into a directory, which the next region manifest lists; gc takes it off the list
 * (drains it), and deletes the directory later. Version v of the table has the generations 1 to prog[v]; its readers find the
 * others by the list. What counts as read: each version that can be opened has all generations, in the base or on the list,
 * and those on the list are there (check_versions); so has each reader that keeps open a version which may be gone by now.
 *
 * Time is not counted. A gate that waits for an age is open as soon as what the wait assumes is true: --drain-after, that no
 * reader has a version open since before; --reader-grace, that none still uses a list from before. Real gates open later.
 * Merges are atomic here, and stand for any number of mergers: a commit is V + 1 or nothing (commit.pml). A put of a region
 * manifest succeeds for a process that has read the newest one; fresh has a bit for each such process.
 *
 * Searched in parts, as the whole is too large:
 *   A  writers: two of them, 3 generations, 2 attempts to flush each, 3 claims; gc; a reader; the region is used again
 *   B  versions: 2 generations, 6 versions, a tag, a restore, expiry; gc with its records of progress; a reader
 *   C  holds: 2 generations, 3 versions, a tag, a hold, expiry; gc; two readers
 *   D  liveness: one generation, a flush that is cut off, a tag, a hold, expiry, gc, a reader; under weak fairness the
 *      backlog ends, and garbage goes
 *   E  as A, with two readers and 2 claims
 *   F  as B, with two readers and 5 versions
 *   G  all processes at once: as E, with an expiry in its steps instead of one, and without a region that is used again
 *
 * Planted bugs (-DBUG=n), each with its part:
 *   1  (B) gc asks the newest version alone what is merged; then a version below is restored
 *   2  (B) a generation is drained as soon as no version lacks it, whatever readers have open
 *   3  (B) a record of progress outlives a restore
 *   4  (B) a version before a gap shows when a generation was merged
 *   5  (B) the tags of a branch stand at the table's root, and an expiry on the branch does not read them
 *   6  (B) an expiry does not read the tags again after it deleted a manifest
 *   7  (B) gc takes no notice of a tag whose version is not listed
 *   8  (C) an expiry reads the holds, and announces afterwards
 *   9  (A) a region is recognized by its id: it was removed, and another one has that id
 *   10  (A) a plan is executed without a second proof
 *   11  (A) an orphan is deleted without a manifest that fences its flush
 *   12  (C) an expiry puts a version back for a hold that was not granted; gc has drained what the version needs
 *   13  (B) a reader opens an older version, and keeps it open: a limit of the rules as they are, see README.md
 *   14  (B) a tag's version is checked, and the tag is written later: a limit of the rules as they are, see README.md
 *   15  (D) a hold that was refused stays
 *   16  (D) gc waits for a moment in which no reader has a version open
 */
#ifndef BUG
#define BUG 0
#endif
/* The parts with two readers: C, and A and B within lower bounds. */
#ifdef PART_E
#define PART_A
#define LESS
#define READERS 2
#ifdef SHORT
#define CLAIMS 1
#endif
#endif
#ifdef PART_F
#define PART_B
#define LESS
#define READERS 2
#ifdef SHORT
#define V 3
#endif
#endif
#ifdef PART_G
#define PART_A
#define LESS
#define READERS 2
#ifdef SHORT
#define CLAIMS 1
#endif
#endif
#if defined(PART_C) && !defined(SHORT) && !BUG
#define READERS 2
#endif
#ifndef READERS
#define READERS 1
#endif
#ifdef PART_A
#define N 3
#define V 3
#define A 2
#ifdef CLAIMS
#elif defined(SHORT) || defined(LESS)
#define CLAIMS 2
#else
#define CLAIMS 3
#endif
#endif
#ifdef PART_B
#define N 2
#ifdef V
#elif defined(SHORT) || defined(LESS)
#define V 4
#else
#define V 5
#endif
#define A 1
#endif
#ifdef PART_C
#define HOLDS
#define N 2
#define V 2
#define A 1
#endif
#ifdef PART_D
#define HOLDS
#define N 1
#define V 1
#define A 2
#define OR ;
#else
#define OR ::
#endif
#define BIT(n) (1 << (n))
#define MINUS(set, n) (set & (255 - BIT(n)))
#define NONE 255
#if BUG == 14
#define THEN }; atomic {
#else
#define THEN ;
#endif

/* The region. Directory a of generation g is bit a of dirs[g]; that of the published generation is name[g]. */
byte cur = 1, listed, name[N+1], dirs[N+1];   /* generations below cur were published; the list, a bit for each */
byte fresh;
#ifdef PART_A
byte epoch, claims;
bit again, mark[V+1];       /* 1: the region is another one; that which version v has merged */
#define OTHER(v) (mark[v] != again)
/* What identifies the region: the number and the directory of the last merged generation. */
#if BUG == 9
#define SAME true
#else
#define SAME (!prog[head] || (cur > prog[head] && !(listed & BIT(prog[head]) && OTHER(head))))
#endif
#else
#define OTHER(v) false
#define SAME true
#endif
#ifdef PART_A
#define ANCHORED (anchor == again)   /* the region's manifest, by which its files were listed, is unchanged */
#else
#define ANCHORED true
#endif
#define THERE(g) (dirs[g] & BIT(name[g]))

/* The table. A version's manifest exists, or only its files, or nothing. */
#define LIVE 0
#define ASIDE 1
#define GONE 2
byte head, st[V+1], prog[V+1], tags; bool restored;
byte rec, recp, recwait;    /* gc's record: version + 1, its progress; the readers since before it */
#ifdef HOLDS
byte announced, holds, granted;
#else
#define holds 0
#endif

#ifdef PART_D
bit died, flying;           /* a process died during its flush; one is in it */
#endif

/* Readers: the newest version when it opened + 1; the progress of what it opened; the list in use. */
byte opened[READERS], has[READERS], list[READERS];

inline check_versions() {
    x = 0;
    do
    :: x <= head -> y = (OTHER(x) -> 1 : prog[x] + 1);
       do :: y < cur -> assert(st[x] != LIVE || (listed & BIT(y) && THERE(y))); y++ :: else -> break od; x++
    :: else -> break
    od; x = 0; y = 0
}
inline publish(p) {
    prog[head + 1] = p;
#ifdef PART_A
    mark[head + 1] = again;
#endif
    head++
}

#ifdef PART_A
active [2] proctype Writer() {
    byte g, a;
    do
    :: d_step { epoch != _pid + 1 && claims < CLAIMS -> claims++; epoch = _pid + 1; fresh = 0 }
    /* It reads the newest manifest, and writes a directory of a new name. */
    :: d_step { epoch == _pid + 1 && cur <= N && !(dirs[cur] & BIT(A)) -> fresh = fresh | BIT(_pid); g = cur;
          a = 1; do :: dirs[g] >= BIT(a) -> a++ :: else -> break od; dirs[g] = dirs[g] | BIT(a) };
       /* Any time later, the next manifest lists it, or another one was published since. */
       atomic {
          if
          :: fresh & BIT(_pid) -> assert(dirs[g] & BIT(a)); name[g] = a; listed = listed | BIT(g); cur++; fresh = 0
          :: else
          fi; g = 0; a = 0 }
    od
}
#endif

/* What is one step: merges, tags, restores; in parts B and C flushes, too, in A and E an expiry. */
active proctype Table() {
    byte v, x, y;
    do
    :: d_step { head < V && prog[head] + 1 < cur && SAME -> v = prog[head] + 1; assert(listed & BIT(v) && THERE(v)); publish(v); v = 0 }
#ifdef PART_G
#elif defined(PART_A)
    :: d_step { head && st[head - 1] == LIVE -> do :: v < head -> st[v] = GONE; v++ :: else -> break od; v = 0 }
    :: d_step { !again && cur > 1 && !opened[0] -> again = 1; cur = 1; listed = 0; fresh = 0; epoch = 0;
          name[1] = 0; name[2] = 0; name[3] = 0; dirs[1] = 0; dirs[2] = 0; dirs[3] = 0 }
#elif !defined(PART_D)
    :: d_step { cur <= N -> name[cur] = 1; dirs[cur] = BIT(1); listed = listed | BIT(cur); cur++ }
    :: atomic { !tags -> v = 0; do :: v < head -> v++ :: break od; if :: st[v] == LIVE :: else -> v = NONE fi
          THEN if :: v != NONE -> tags = BIT(v) :: else fi; v = 0 }
    :: tags = 0
#endif
#ifdef PART_B
    :: atomic { !restored && head < V -> v = 0; do :: v + 1 < head -> v++ :: break od;
          if :: st[v] == LIVE && prog[v] < prog[head] -> restored = true; d_step { publish(prog[v]); check_versions() } :: else fi; v = 0 }
#endif
    od
}

#ifdef PART_D
active proctype Writer() {
    byte a;
    do
    :: d_step { !a && cur <= N -> a = (dirs[cur] -> 2 : 1); dirs[cur] = dirs[cur] | BIT(a); flying = 1 }
    :: d_step { a -> name[cur] = a; listed = listed | BIT(cur); cur++; a = 0; flying = 0 }
    :: d_step { a && !died -> died = 1; a = 0; flying = 0 }
    od
}
active proctype Tagger() {
    byte v;
    atomic { do :: v < head -> v++ :: break od; if :: st[v] == LIVE -> tags = BIT(v) :: else fi; v = 0 };
    tags = 0
}
#endif

/* A record is dropped if a later version has less progress. */
inline drop_overtaken() {
#if BUG == 3
    skip
#else
    x = rec;
    do :: rec && x <= head -> if :: st[x] == LIVE && prog[x] < recp -> rec = 0 :: else fi; x++ :: else -> break od; x = 0;
    if :: !rec -> recp = 0; recwait = 0 :: else fi
#endif
}

#if !defined(PART_A) || defined(PART_G)
#if BUG == 5
#define KEPT(v) (holds & BIT(v))
#else
#define KEPT(v) ((tags | holds) & BIT(v))
#endif
#if BUG == 12
#define BACK(v) KEPT(v)
#elif BUG == 5
#define BACK(v) false
#else
#define BACK(v) (tags & BIT(v))
#endif
active proctype Expire() {
    byte v, x, y; bool kept;
#ifdef PART_D
    byte turn;
#endif
    do
#ifdef PART_D
    :: atomic { v = turn; turn = (v + 1 < head -> v + 1 : 0);
#else
    :: atomic { v = 0; do :: v + 1 < head -> v++ :: break od;
#endif
          if :: v < head && st[v] == LIVE && !KEPT(v) -> d_step { drop_overtaken() } :: else -> v = NONE fi };
       if
       :: v != NONE ->
#if defined(HOLDS) && BUG != 8
          announced = BIT(v);
#endif
          kept = (KEPT(v) != 0);
#if defined(HOLDS) && BUG == 8
          announced = BIT(v);
#endif
          if
          :: !kept -> st[v] = ASIDE                         /* its manifest is deleted */
          :: else
          fi;
          d_step {
             if
             :: kept
#if BUG != 6
             :: !kept && BACK(v) -> st[v] = LIVE            /* it is put back */
             :: !kept && !BACK(v) ->
#else
             :: !kept ->
#endif
                assert(!(tags & BIT(v)));
#ifdef HOLDS
                assert(!(granted & BIT(v)));
#endif
                st[v] = GONE                                /* its files are deleted */
             fi; check_versions() };
          kept = false;
#ifdef HOLDS
          announced = 0
#endif
       :: else
       fi; v = 0
    od
}
#endif

#ifdef HOLDS
active proctype Holder() {
    byte v;
    do
    :: atomic { v = 0; do :: v < head -> v++ :: break od; if :: st[v] == LIVE :: else -> v = NONE fi };
       if
       :: v == NONE -> v = 0
       :: else ->
          holds = BIT(v);
          atomic { if
#if BUG != 15
             :: announced & BIT(v) || st[v] != LIVE -> holds = 0
#else
             :: announced & BIT(v) || st[v] != LIVE -> break
#endif
             :: else -> granted = BIT(v) fi; v = 0 };
          atomic { holds = 0; granted = 0 }
       fi
#ifdef PART_D
       ; break
#endif
    od
}
#endif

/* Each keeps a version open, and reads the list and the generations again and again. They are alike: a state in which two of
 * them have changed places is stored once. */
#if READERS == 1
#define order() skip
#else
#define BELOW(what, then) (what[0] < what[1] || (what[0] == what[1] && (then)))
#define SWAP(what) v = what[0]; what[0] = what[1]; what[1] = v
inline order() {
    if
    :: BELOW(opened, BELOW(has, BELOW(list, (recwait & 3) == 2))) -> SWAP(opened); SWAP(has); SWAP(list); v = 0;
       recwait = (recwait >> 1 & 1) + (recwait << 1 & 2)
    :: else
    fi
}
#endif
active proctype Readers() {
    byte i, y, v;
    bit done;               /* in part D, each closes what it opened */
    do
    :: atomic { i = 0; do :: i + 1 < READERS -> i++ :: break od;
       if
       :: !opened[i] -> v = head;
#if BUG == 13
          do :: v > 0 -> v-- :: break od;
#endif
          if :: st[v] == LIVE -> opened[i] = head + 1; has[i] = (OTHER(v) -> 0 : prog[v]) :: else fi; v = 0
       :: opened[i] && !list[i] && !done -> 
          list[i] = listed & (256 - BIT(has[i] + 1)); y = has[i] + 1;   /* what it needs of the list */
          do :: y < cur -> assert(listed & BIT(y)); y++ :: else -> break od; y = 0
       :: list[i] -> y = has[i] + 1;
          do :: y < cur -> assert(!(list[i] & BIT(y)) || THERE(y)); y++ :: else -> break od; y = 0; list[i] = 0
#ifdef PART_D
          ; done = 1
#endif
       :: opened[i] && !list[i] -> opened[i] = 0; has[i] = 0; recwait = MINUS(recwait, i); done = 0
       fi; i = 0; d_step { order() } }
    od
}

/* low: what all versions that can be opened have merged. Nothing, if a tag names a version that is not listed. */
inline read_versions() {
    low = prog[head];
    x = 0;
    do
    :: x <= head ->
       if
#if BUG != 1
       :: st[x] == LIVE && prog[x] < low -> low = prog[x]
#endif
#if BUG != 7
       :: st[x] != LIVE && tags & BIT(x) -> low = 0
#endif
       :: else
       fi; x++
    :: else -> break
    od; x = 0
}
/* low, and not more than was merged --drain-after ago: by a version from before all readers, or by a record. */
inline read_merged_before() {
#if BUG == 1 || BUG == 2
    skip
#else
    before = 0; x = head;
    do
#if BUG == 4
    :: st[x] != LIVE && x -> x--
    :: st[x] != LIVE && !x -> break
#else
    :: st[x] != LIVE -> break
#endif
    :: else -> z = 0; do :: z < READERS && !(opened[z] && opened[z] <= x) -> z++ :: else -> break od;
       if :: z == READERS -> before = prog[x]; break :: z < READERS && x -> x-- :: z < READERS && !x -> break fi
    od;
    if :: rec && !recwait && rec <= head + 1 && recp > before -> before = recp :: else fi;
    if :: before < low -> low = before :: else fi; x = 0; z = 0; before = 0
#endif
}
inline drain() {
    if :: !SAME -> low = 0 :: else fi; g = 1;
    do :: g <= low -> if :: listed & BIT(g) -> listed = MINUS(listed, g); fresh = 0 :: else fi; g++ :: else -> break od;
    g = 0; low = 0
}
#if BUG == 16
#define USED(z, g) opened[z]
#else
#define USED(z, g) (list[z] & BIT(g))
#endif
/* The gates of directory a of generation g, by low and the newest region manifest. */
inline prove() {
    ok = SAME && !(listed & BIT(g) && name[g] == a);
    if
#ifdef PART_D
    :: g >= cur -> ok = ok && !flying                      /* --orphan-min-age is longer than a flush */
#else
    :: g >= cur                                            /* never published: its rows are in the log */
#endif
    :: g < cur && name[g] != a -> ok = ok && (listed & BIT(g) || g <= low)
    :: g < cur && name[g] == a -> ok = ok && g <= low;
       z = 0; do :: z < READERS -> if :: USED(z, g) -> ok = false :: else fi; z++ :: else -> break od; z = 0
    fi
}

active proctype Gc() {
    byte low, before, x, y, z, g, a; bool ok;
#ifdef PART_A
    bit anchor;
#endif
#ifdef PART_D
    byte turn;
#endif
    do
    ::
#ifndef PART_A
       d_step { drop_overtaken(); low = head + 1; before = prog[head] };
       d_step {                                             /* record the progress of the newest version */
          if :: !rec && before -> rec = low; recp = before;
                do :: x < READERS -> if :: opened[x] -> recwait = recwait | BIT(x) :: else fi; x++ :: else -> break od; x = 0
             :: else fi; low = 0; before = 0 }
    OR
#endif
       d_step { read_versions(); read_merged_before() };
       /* Read the region manifest, and put the next one. If another one came in between, the put fails: nothing happens. */
       d_step { drain(); check_versions() }
    OR atomic {                                             /* plan one directory */
#ifdef PART_D
          g = turn / A + 1; a = turn % A + 1; turn = (turn + 1) % (N * A);
#else
          g = 1; a = 1; do :: g < N -> g++ :: break od; do :: a < A -> a++ :: break od;
#endif
          if :: dirs[g] & BIT(a) && !(listed & BIT(g) && name[g] == a)
#ifdef PART_A
             -> anchor = again
#endif
          :: else -> g = 0; a = 0 fi };
       if
       :: g ->
#if BUG == 10
          d_step { read_versions(); prove(); low = 0; if :: !ok -> g = 0; a = 0 :: else fi };
          ok = false;
#endif
#if defined(PART_A) && BUG != 10 && BUG != 11
          d_step { if :: g >= cur -> fresh = 0 :: else fi };   /* fence its flush */
#endif
#if BUG != 10
          d_step { read_versions() };
          d_step { prove(); low = 0; if :: !ok -> g = 0; a = 0 :: else fi; ok = false };
#endif
          d_step {
             if :: g && dirs[g] & BIT(a) && ANCHORED -> dirs[g] = MINUS(dirs[g], a); check_versions() :: else fi; g = 0; a = 0 }
       :: else
       fi
    od
}

#ifndef PART_D
/* Garbage goes: at any moment, if readers close, holds and tags end, and what is unmerged is merged, then an expiry and two
 * runs of gc leave no directory. The state is reset afterwards, so that this adds no states. */
active proctype Audit() {
    byte low, before, x, y, z, g, a; bool ok;
    d_step {
        (SAME && prog[head] + 1 >= cur) ->
        tags = 0; recwait = 0;
        x = 0; do :: x < READERS -> opened[x] = 0; list[x] = 0; has[x] = 0; x++ :: else -> break od;
        x = 0; do :: x < head -> st[x] = GONE; x++ :: else -> break od; x = 0;
        fresh = 0; read_versions(); read_merged_before(); drain();
        read_versions(); g = 1;
        do
        :: g <= N -> a = 1;
           do :: a <= A -> if :: dirs[g] & BIT(a) -> prove(); assert(ok) :: else fi; a++ :: else -> break od; g++
        :: else -> break
        od;
        low = 0; g = 0; a = 0; ok = false;
        /* A state without work. */
        cur = N + 1; listed = 0; head = V; x = 0; rec = 0; recp = 0; restored = true;
        do :: x <= V -> prog[x] = N; st[x] = (x < V -> GONE : LIVE); x++ :: else -> break od; x = 0;
        do :: x <= N -> dirs[x] = 0; name[x] = 0; x++ :: else -> break od; x = 0;
#ifdef PART_A
        again = 1; mark[V] = 1; epoch = 0; claims = CLAIMS
#endif
    }
}
#else
/* Under weak fairness: each process that can always go on does. Readers, the tag and the hold end; no more than one flush
 * is cut off. */
ltl ends { <>[] (prog[head] == N && !dirs[1]) }
#endif

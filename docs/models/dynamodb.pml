/* A table at s3+ddb://: writers that commit by an entry in DynamoDB, readers that finish commits, an expiry, gc of staged
 * manifests, and a migration to plain S3, after which a writer commits there. Any process may stall at any step, be taken
 * for dead, and resume.
 *
 * entry[v] is what DynamoDB has for version v: FREE (nothing), the writer whose manifest it names, or FENCED. named[v]: by the
 * staged name, so that the commit is not finished. staged[v] has a bit for each writer whose staged manifest of v exists; file[v]
 * is whose manifest has the final name, 0: none. held[v] is whose commit was acknowledged; gone[v]: an expiry deleted it.
 *
 * Properties (check): a version has one manifest, that of the acknowledged commit; until an expiry, it has its final name or
 * gets it from what the entry names; what was deleted does not come back; plain S3 has all versions after the migration. Each
 * commit follows the newest version.
 *
 * Planted bugs (-DBUG=n):
 *   1  an entry is put without a condition: two commits of one version are acknowledged
 *   2  the entry is put before the staged manifest
 *   3  the response to the entry's put is lost, and the writer deletes the staged manifest that the entry names
 *   4  the entry gets the final name before the manifest is copied
 *   5  gc deletes a staged manifest whose version has no entry yet
 *   6  an expiry deletes the entry with the manifest: a stalled writer commits the version again
 *   7  an expiry deletes a version whose commit is not finished: the next reader copies the manifest again
 *   8  an expiry leaves the staged manifest that a killed process did not delete: a stalled reader copies it again
 *   9  a migration finishes all commits, and fences later versions without a check: one is committed in between
 *   10  a migration fences nothing: what is committed by DynamoDB afterwards is not in plain S3
 *   11  a migration checks the newest version alone: a writer left one before it unfinished, and built on it
 */
#ifndef BUG
#define BUG 0
#endif
#define V 2
#if defined(SHORT) || BUG
#define READERS 1
#else
#define READERS 2
#endif
#define BIT(n) (1 << (n))
#define MINUS(set, n) (set & (255 - BIT(n)))
#define FREE 0
#define FENCED 15
#define W 2
#define PLAIN (W + 1)                       /* the writer of plain S3 */

byte entry[V+1], staged[V+1], file[V+1], held[V+1];
bool named[V+1], gone[V+1];
byte newest;                                /* the version of the last acknowledged commit */
bool moved, whole;                          /* the migration: later versions are fenced; it has ended */

inline check() {
    x = 1;
    do
    :: x <= V ->
       assert(!file[x] || !held[x] || file[x] == held[x]);
       assert(!gone[x] || !file[x]);
       assert(!held[x] || gone[x] || file[x] == held[x] || (!whole && named[x] && entry[x] == held[x] && staged[x] & BIT(held[x])));
       x++
    :: else -> break
    od; x = 0
}

/* Finish the commit of version v, whose entry named the staged manifest of writer w when it was read. */
inline copy() { if :: staged[v] & BIT(w) -> file[v] = w :: else fi }
inline name_final() { if :: entry[v] == w -> named[v] = false :: else fi }
inline finish() {
#if BUG == 4
    d_step { name_final(); check() };
    d_step { copy(); check() };
#else
    d_step { copy(); check() };
    /* Nothing to copy: another process finished it. */
    d_step { assert(file[v] || !(named[v] && entry[v] == w)); if :: file[v] -> name_final() :: else fi; check() };
#endif
    d_step { staged[v] = MINUS(staged[v], w); check() }
}
inline finish_at_once() {                   /* in steps, that is a reader */
    if :: named[v] -> w = entry[v]; copy(); named[v] = false; staged[v] = MINUS(staged[v], w); w = 0 :: else fi
}
inline finish_all() { v = 1; do :: v <= V -> finish_at_once(); v++ :: else -> break od; v = 0 }

active [W] proctype Writer() {
    byte v, w, x;
    w = _pid + 1;
    do
    /* It builds on the newest version. Whoever reads that finishes it first; its own it has at hand. */
    :: d_step { newest < V && (!named[newest] || held[newest] == w) -> v = newest + 1 };
#if BUG != 2
       d_step { if :: v > V -> v = 0 :: else -> staged[v] = staged[v] | BIT(w) fi };
#endif
       atomic {
          if
#if BUG == 1
          :: v && entry[v] != FENCED ->
#else
          :: v && entry[v] == FREE ->
#endif
             assert(v == newest + 1 && !held[v]);
             entry[v] = w; named[v] = true; held[v] = w; newest = v
          :: else ->                        /* another commit has the version: its own manifest goes, or stays if it is killed */
             if :: v && BUG != 2 -> staged[v] = MINUS(staged[v], w) :: true fi; v = 0
          fi };
#if BUG == 2
       d_step { if :: v -> staged[v] = staged[v] | BIT(w) :: else fi };
#endif
#if BUG == 3
       if :: d_step { v -> staged[v] = MINUS(staged[v], w); check() } :: true fi;
#endif
       if
       :: v -> if :: finish() :: true fi    /* or it is killed, and another writer takes its place */
       :: else
       fi; v = 0
    od
}

/* Opens any version. */
active [READERS] proctype Reader() {
    byte v, w, x;
    do
    :: atomic { !moved && newest -> v = 1; do :: v < newest -> v++ :: break od; if :: named[v] -> w = entry[v] :: else -> v = 0 fi };
       if :: v -> finish() :: else fi; v = 0; w = 0
    od
}

/* By s3+ddb://; after the migration it has ended. */
active proctype Expire() {
    byte v, w, x;
    do
    :: atomic { !moved && newest > 1 -> v = 1; do :: v + 1 < newest -> v++ :: break od; if :: !gone[v] :: else -> v = 0 fi };
       if
       :: v ->
#if BUG != 7
          d_step { finish_at_once(); check() };
#endif
#if BUG != 8
          d_step { if :: !named[v] -> staged[v] = 0 :: else fi; check() };
#endif
          d_step { file[v] = 0; gone[v] = true;
#if BUG == 6
             entry[v] = FREE; held[v] = 0;
#endif
             check() }
       :: else
       fi; v = 0
    od
}

active proctype Gc() {
    byte v, w, x;
    do
    :: atomic { v = 1; do :: v < V -> v++ :: break od; w = 1; do :: w < W -> w++ :: break od;
          if
#if BUG == 5
          :: staged[v] & BIT(w) && !(named[v] && entry[v] == w)
#else
          :: staged[v] & BIT(w) && entry[v] != FREE && !(named[v] && entry[v] == w)
#endif
          :: else -> v = 0
          fi };
       d_step { if :: v -> staged[v] = MINUS(staged[v], w); check() :: else fi; v = 0; w = 0 }
    od
}

active proctype Migrate() {
    byte v, w, x, n;
    d_step { finish_all() };
    do
    :: d_step { newest && !named[newest] -> n = newest };
       d_step {                             /* one transaction: n is finished, and has no entry after it */
          if
#if BUG == 9 || BUG == 10
          :: true ->
#else
          :: n == newest && !named[n] ->
#endif
#if BUG != 10
             x = n + 1; do :: x <= V -> if :: entry[x] == FREE -> entry[x] = FENCED :: else fi; x++ :: else -> break od; x = 0;
#endif
             moved = true
          :: else
          fi; n = 0 };
       if :: moved -> break :: else fi
    od;
    skip;
#if BUG != 9 && BUG != 11
    d_step { finish_all() };
#endif
    d_step { whole = true; check() }
}

active proctype Plain() {
    byte v, x;
    do
    :: d_step { whole -> v = V; do :: v && !file[v] -> v-- :: else -> break od; v++ };   /* the newest version in S3 */
       d_step {
          if
          :: v <= V && !file[v] -> assert(v == newest + 1 && !held[v]); file[v] = PLAIN; held[v] = PLAIN; newest = v; check()
          :: else
          fi; v = 0 }
    od
}

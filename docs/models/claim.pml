/* A region's writers: claim, replay, log entries, flush, seal; gc deletes log entries.
 *
 * Three writers, each claims once, may stall at any step, and resumes at any time. Position p of the log has an entry, of the
 * epoch entry[p], or none. What is at or below the manifest's replay is not read again: it must be in a generation (flushed).
 * acked has the positions of rows that were acknowledged. The property is safe: each of them is in a generation, or the next
 * writer will replay it, since no position before it is missing and the region is not sealed.
 *
 * fresh has a bit for each writer that has read the newest manifest: a put of the next one succeeds for them alone. Fence posts
 * are kept forever here: a writer that resumes after --fence-retention is not in the model, nor is the wait for readers.
 *
 * Searched in parts:
 *   A  the writer of the region layout, by memwal-ops
 *   B  the writer of the shard layout, by pylance: it puts an entry without rows when it claims, after the last entry that
 *      is listed, searches the log for its end afterwards, and passes over a position that is taken
 *
 * Planted bugs (-DBUG=n), each with its part:
 *   1  (A) gc deletes all that is flushed: a fenced writer finds its position free, and its row is acknowledged
 *   2  (A) gc takes no notice of a writer that has claimed and written nothing
 *   3  (A) a put that waited while the writer was closed is acknowledged behind the flush; then the region is sealed
 *   4  (A) an equal manifest counts as the writer's own: two writers have one epoch
 *   5  (A) a region is sealed without an entry at the position where a stalled writer puts its next one
 *   6  (A) a writer passes over an entry at its position, which a fenced writer put, and flushes beyond it
 *   7  (A) a flush is published although another writer has published a manifest since it began
 *   8  (B) gc deletes the last entry: the entry of the next claim is put where no writer puts one
 *   9  (B) gc deletes entries before the first one of a writer that still searches for the end
 */
#ifndef BUG
#define BUG 0
#endif
#ifndef P
#ifdef PART_A
#define P 3
#else
#define P 4
#endif
#endif
#define BIT(n) (1 << (n))
#define UPTO(n) ((1 << ((n) + 1)) - 2)     /* positions 1 to n */

byte epoch, replay, fresh; bool sealed;    /* the newest region manifest */
byte entry[P+1];
byte acked, flushed;                       /* positions, a bit each */
byte start[4];                             /* of each epoch: replay when it claimed */

inline safe() {
    x = 1; gap = false;
    do
    :: x <= P ->
       if :: x > replay && !entry[x] -> gap = true :: else fi;
       assert(!(acked & BIT(x)) || flushed & BIT(x) || (x > replay && !gap && !sealed)); x++
    :: else -> break
    od; x = 0; gap = false
}
/* The writer puts an entry, with a row or without, at its next position, or at the first free one behind. */
inline put(row) {
    do
    :: next > P -> goto done                                /* a bound of the model */
    :: d_step { next <= P && !entry[next] -> entry[next] = e; has = has | BIT(next);
          if :: row -> assert(next > replay); acked = acked | BIT(next); safe() :: else fi; next++ }; break
    :: d_step { next <= P && entry[next] ->
          if
          :: epoch != e || sealed -> next = P + 1           /* it reads the manifest: it was fenced */
          :: else ->
#if defined(PART_A) && BUG != 6
             has = has | BIT(next);                         /* of a writer that has not noticed that it was fenced */
#endif
             next++
          fi }
    od
}
/* It reads the manifest, writes a generation, and publishes the next manifest. */
inline flush() {
    d_step { if :: epoch != e || sealed -> next = P + 1 :: else -> fresh = fresh | BIT(_pid); to = next - 1 fi };
    d_step {
       if
#if BUG == 7
       :: next <= P + 1 && to ->
#else
       :: next <= P + 1 && to && fresh & BIT(_pid) ->
#endif
          assert(to >= replay); flushed = flushed | (has & UPTO(to)); replay = to; fresh = 0; safe()
       :: else
       fi; to = 0 }
}

active [3] proctype Writer() {
    byte e, next, has, x, to; bool gap;
    /* The claim: the next manifest, with the next epoch. */
#if BUG == 4
    d_step { !sealed -> e = epoch + 1; fresh = fresh | BIT(_pid); to = replay };
#else
    d_step { !sealed && epoch == _pid -> e = epoch + 1; fresh = fresh | BIT(_pid); to = replay };   /* in this order: they are alike */
#endif
    if
    :: d_step { fresh & BIT(_pid) -> epoch = e; fresh = 0; start[e] = to; next = to + 1; to = 0
#if BUG == 4
       ; fresh = 128                                        /* the other put of these bytes has not come yet */
#endif
       }
#if BUG == 4
    :: d_step { epoch == e && fresh == 128 -> next = to + 1; to = 0 }
#endif
    :: d_step { !(fresh & BIT(_pid)) -> e = 0; to = 0 }; goto done  /* another one claimed: it may try again, as another writer */
    fi;
#ifdef PART_B
    /* An entry without rows behind the last one that is listed. */
    d_step { x = P; do :: x && !entry[x] -> x-- :: else -> break od; to = x + 1; x = 0 };
    if
    :: to > P -> goto done
    :: d_step { to <= P && !entry[to] -> entry[to] = e; to = 0 }
    :: d_step { to <= P && entry[to] -> to = 0 }; goto done
    fi;
#endif
    do                                                      /* it replays up to the first missing entry */
    :: d_step { next <= P && entry[next] -> if :: entry[next] > e -> next = P + 1 :: else -> has = has | BIT(next); next++ fi }
    :: next > P || !entry[next] -> break                    /* an entry of a later epoch: it was fenced */
    od;
    do
    :: put(true)
    :: flush()
#ifdef PART_A
    :: break
#endif
    :: next > P -> goto done
    od;
#ifdef PART_A
    /* It is sealed: an entry without rows, a flush, and a manifest, unless another writer claimed meanwhile. */
#if BUG != 5
    put(false);
#endif
    flush();
#if BUG == 3
    put(true);
#endif
    atomic { if :: epoch == e && !sealed -> sealed = true; fresh = 0; d_step { safe() } :: else fi };
#endif
done: skip
}

/* Any entry that is flushed and no fence post. */
active proctype Gc() {
    byte p, x, y, n, first; bool post, gap;
    do
    :: atomic { p = 1; do :: p < P -> p++ :: break od; if :: p <= replay && entry[p] :: else -> p = 0 fi };
       d_step {
          if
          :: p && BUG != 1 ->
             x = p - 1; do :: x && !entry[x] -> x-- :: else -> break od;
             post = (!x || entry[x] != entry[p]);           /* the first of a run */
             do :: x -> if :: entry[x] > entry[p] -> post = true :: else fi; x-- :: else -> break od;   /* late */
             x = p + 1; do :: x <= P && !entry[x] -> x++ :: else -> break od;
#if BUG != 8
             if :: x > P -> post = true :: else fi;         /* the last */
#endif
             y = 1;
             do                                             /* a writer may have this position next */
             :: y <= epoch && y < 4 -> n = 0; first = 0; x = P;
                do :: x -> if :: entry[x] == y -> n++; first = x :: else fi; x-- :: else -> break od;
                if
#if BUG != 2
                :: !n && start[y] < p -> post = true
#endif
#if defined(PART_B) && BUG != 9
                :: n == 1 && start[y] < p && p < first -> post = true
#endif
                :: else
                fi; y++
             :: else -> break
             od;
             if :: post -> p = 0 :: else fi
          :: else
          fi; x = 0; y = 0; n = 0; first = 0; post = false };
       d_step { if :: p -> entry[p] = 0; safe() :: else fi; p = 0 }
    od
}

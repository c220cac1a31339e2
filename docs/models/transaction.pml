/* The LM-DiskANN index: the store, pages of the graph, the view, the registry of readers; the writer is killed at any step.
 *
 * One node. Each commit writes its new version into a slot of the graph; page[s] is the epoch of the version there, or TORN:
 * it was being written when the writer or the machine went down. A page is durable once the graph was synced (dirty: not yet).
 * The store has the newest epoch, the slot of its version, and when each slot was freed. The view is what readers open: it may
 * be behind the store, and says from which epoch on everything can be read (retained).
 *
 * A reader reads the view, registers the epoch, reads the view again, and then reads the page. Before the writer uses a freed
 * slot it raises retained in the view, and reads the registry afterwards: at least one of the two sees the other. In the
 * product a reader checks each page, and begins again if it is not the one: here that is an error, since a hold would fail.
 *
 * Planted bugs (-DBUG=n):
 *   1  the store commits before the graph is synced, and the machine goes down
 *   2  a version is written over the page of the one before
 *   3  a freed slot is used although a registered reader reads it
 *   4  the registry is read first, and retained is raised afterwards
 *   5  the view is published before the store commits, and the writer is killed
 *   6  the next writer does not publish what was committed and not published
 *   7  a reader does not read the view again after it registered
 */
#ifndef BUG
#define BUG 0
#endif
#ifndef E
#define E 4                 /* epochs 1 to E */
#endif
#define SLOTS 4
#define READERS 2
#define TORN 255

byte page[SLOTS]; bool dirty[SLOTS];
byte epoch, slot, freed[SLOTS], used;           /* the store; slots from used on were never used */
byte seen, seenslot, retained;                  /* the view */
byte lock, acked;
byte registered[READERS];

#define CAN_DIE if :: skip :: goto dead fi; skip

active [2] proctype Writer() {
    byte s, low, i; bool ok;
start:
    atomic { !lock -> lock = _pid + 1 };
    /* The store never lacks a version: it is recovered, and the view is published again. */
    d_step {
        assert(epoch == 0 || page[slot] == epoch); assert(seen <= epoch && acked <= epoch);
#if BUG != 6
        seen = epoch; seenslot = slot
#endif
    };
    do
    :: acked < epoch -> acked = epoch; assert(seen >= acked)    /* the caller is told */
    :: atomic { acked == epoch && epoch < E -> s = used };
       if
#if BUG == 2
       :: epoch -> s = slot
       :: !epoch
#else
       :: s < SLOTS                                         /* the file grows */
#if BUG == 4
       :: d_step { low = seen; i = 0;
             do :: i < READERS -> if :: registered[i] && registered[i] < low -> low = registered[i] :: else fi; i++ :: else -> break od; i = 0 };
          retained = seen;
#else
       :: retained = seen;
          CAN_DIE;
          d_step { low = retained;
#if BUG != 3
             i = 0;
             do :: i < READERS -> if :: registered[i] && registered[i] < low -> low = registered[i] :: else fi; i++ :: else -> break od; i = 0
#endif
          };
#endif
          d_step { s = 0; do :: s < SLOTS && !(freed[s] && freed[s] <= low) -> s++ :: else -> break od; low = 0 }
#endif
       fi;
       if
       :: s == SLOTS -> s = 0                               /* none is free: it tries again */
       :: s < SLOTS ->
          d_step { page[s] = TORN; dirty[s] = true };
          CAN_DIE;
          page[s] = epoch + 1;
          CAN_DIE;
#if BUG != 1
          dirty[s] = false;                                 /* the graph is synced */
          CAN_DIE;
#endif
#if BUG == 5
          d_step { seen = epoch + 1; seenslot = s };
          CAN_DIE;
#endif
          d_step { epoch++; if :: epoch > 1 && s != slot -> freed[slot] = epoch :: else fi; freed[s] = 0; slot = s;
             if :: s == used -> used++ :: else fi };
          CAN_DIE;
#if BUG == 1
          dirty[s] = false;
#endif
#if BUG != 5
          d_step { seen = epoch; seenslot = slot };         /* a frame of the view */
#endif
          s = 0; CAN_DIE
       fi
    :: epoch == E -> goto dead
    od;
dead:
    atomic { s = 0; low = 0; lock = 0;
       if                                                   /* the machine went down, too: what was not synced is lost */
       :: do :: i < SLOTS -> if :: dirty[i] -> page[i] = TORN :: else fi; i++ :: else -> break od
       :: true
       fi; i = 0 };
    if :: epoch < E -> goto start :: epoch == E && acked < E -> goto start :: else fi
}

active [READERS] proctype Reader() {
    byte i, at, s;
    i = _pid - 2;
    do
    :: d_step { seen -> at = seen; s = seenslot };
       registered[i] = at;
#if BUG != 7
       if
       :: retained > at -> d_step { registered[i] = 0; at = 0; s = 0 }       /* it begins again */
       :: else ->
#endif
          do
          :: assert(page[s] == at)
          :: break
          od;
          atomic { registered[i] = 0; at = 0; s = 0 }
#if BUG != 7
       fi
#endif
    od
}

/* Work ends: at the end of the writers all commits are acknowledged and published. */
init { (lock == 0 && epoch == E && acked == E) -> assert(seen == E) }

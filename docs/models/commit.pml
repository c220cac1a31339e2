/* The commit of progress: two mergers, catchup, an append that is rebased, restore, expire, lost responses, and a table
 * that is removed and created again.
 *
 * One region with N generations. A version is a number, published by put-if-absent. data[v] is what version v contains:
 * generations 1 to data[v], applied in order; WRONG is anything else. prog[v] is its recorded merge progress, parent[v]
 * the version that it was built on. Properties are assertions: those on a version where it is published (publish), those
 * on an acknowledgement where a merger reports success, and that a backlog ends, at the end of every run.
 *
 * Planted bugs (-DBUG=n):
 *   1  a merge is rebased over another merge, as by pylance's commit
 *   2  progress is set by a second commit, after that of the data
 *   3  a merge skips a generation that it cannot read
 *   4  a commit of indexes writes the progress that it read when it began
 *   5  a put is repeated after a lost response, at the next free number, without reading the name back
 *   6  the base is recognized by its number, not by its content: the table was created again up to that number
 *   7  the merger does not verify that what it published is in the history of the newest version
 *   8  the table is created again between the last check and the put: a limit of the rules as they are, see README.md
 */
#ifndef BUG
#define BUG 0
#endif
#ifndef N
#define N 3
#endif
#ifndef V
#ifdef SHORT
#define V 4
#else
#define V 5
#endif
#endif
#define WRONG 15

byte flushed, head;         /* generations 1 to flushed are listed; the newest version */
bool live[V+1];             /* its manifest exists */
bool late[V+1];             /* published although a later version existed: no later version is built on it */
byte data[V+1], prog[V+1], parent[V+1];
bool restored;              /* a restore may take progress back: then the generations are merged again */
bit table;                  /* 1 after the table was created again */
#if BUG == 6 || BUG == 8
bool replaced;              /* nor will the table be created again */
#else
#define replaced true
#endif
bool calm;                  /* no restore will follow */
byte running = 2;           /* mergers */

/* Publish version nv, with generations nd and progress np, built on version from. Always inside an atomic step. */
inline publish(nv, nd, np, from) {
    live[nv] = true; data[nv] = nd; prog[nv] = np; parent[nv] = from;
    if
    :: nv > head ->
       assert(data[nv] != WRONG);                           /* no row twice, lost or revived */
       assert(data[nv] == prog[nv]);                        /* progress is never ahead of the data, nor behind it */
       assert(restored || prog[nv] >= prog[from]);          /* progress only rises, but by a restore */
       head = nv                                            /* last: the arguments are expressions */
    :: else -> late[nv] = true                              /* no reader opens it as the newest */
    fi
}
/* What a merge of generation g on top of version b contains: right only if it was computed from that content. */
#define MERGED(b, g) (data[b] == g - 1 -> g : WRONG)

active proctype Writer() {
    flushed == 1 -> flushed = N
}

active [2] proctype Merger() {
    byte v, g, p, n, m; bit t; bool mine, stale;
    do
    :: d_step { head < V && prog[head] < flushed -> v = head; p = prog[v]; g = p + 1; t = table; mine = false;
#if BUG == 3
        if :: g < flushed -> g++ :: else fi;
#endif
       }
       /* The new version is built. Step 5: v is still the newest, and it is the manifest that was read. */
#if BUG == 6
       stale = (head != v);
#else
       stale = (head != v || table != t);
#endif
       /* Step 6: put-if-absent of v + 1. mine: the response came, or the name was read back. Otherwise it is lost. */
       if
       :: stale                                             /* commit conflict: read everything again */
       :: !stale -> atomic {
          if
#if BUG == 1
          :: head < V -> n = MERGED(head, g); m = (prog[head] > g -> prog[head] : g); publish(head + 1, n, m, head); mine = true
          :: head == V
#elif BUG == 2
          :: !live[v+1] -> publish(v + 1, p, p, v); data[v+1] = g; mine = true
          :: live[v+1]
#else
          :: !live[v+1] -> n = MERGED(v, g); if :: table != t -> n = WRONG :: else fi;
             publish(v + 1, n, g, v);
             if :: mine = true :: mine = false fi
          :: live[v+1]
#endif
          :: true                                           /* the store refused, or the process was killed */
          fi }
#if BUG == 5
          if :: !mine -> atomic { if :: head < V -> n = MERGED(head, g); publish(head + 1, n, g, head) :: else fi } :: mine fi
#endif
       fi;
       /* Step 7: success is reported only of a version on which the newest is built; otherwise it plans again. */
#if BUG == 7
       assert(!mine || !late[v+1]);
#endif
       mine = false; stale = false; n = 0; m = 0
    :: atomic { head == V || (flushed == N && prog[head] == N && calm && replaced) -> v = 0; g = 0; p = 0; t = 0; running--; break }
    od
}

/* Changes index entries only, and keeps the progress of the version that it is built on. */
active proctype Catchup() {
    byte v, p; bit t;
    if
    :: d_step { head < V -> v = head; p = prog[v]; t = table };
       atomic {
          if
#if BUG == 4
          :: head < V -> publish(head + 1, data[head], p, head)
#else
          :: head == v && table == t && head < V -> publish(v + 1, data[v], prog[v], v)
#endif
          :: else
          fi }
    :: head == V
    fi
}

/* An append by pylance is rebased over any version, and keeps the data and the progress of the newest one. */
active proctype Appender() {
    atomic { if :: head < V -> publish(head + 1, data[head], prog[head], head) :: true fi }
}

/* restore(v): content and progress of an older version become the newest one. */
active proctype Restorer() {
    byte v;
    atomic {
        do :: v + 1 < head -> v++ :: break od;
        if :: head < V && live[v] -> restored = true; publish(head + 1, data[v], prog[v], v) :: true fi; v = 0; calm = true }
}

/* Any version but the newest may be deleted at any time. */
active proctype Expire() {
    byte v;
    atomic { do :: v < head -> if :: live[v] = false :: true fi; v++ :: else -> break od; v = 0 }
}

#if BUG == 6 || BUG == 8
/* The table is removed and created again, up to the same number: its newest version has rows of its own. */
active proctype Replacer() {
    atomic {
        if :: head > 0 && head < V -> table = 1; data[head] = 0; prog[head] = 0; restored = true :: true fi; replaced = true }
}
#endif

/* A backlog ends: when every process has ended, all is merged, unless the model has no version numbers left. */
init {
    atomic { live[0] = true; flushed = 1 }
    running == 0 -> assert(head == V || prog[head] == N)
}

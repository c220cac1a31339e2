/* The commit of progress: two mergers, catchup, an append that is rebased, restore, expire, lost responses, and a table
 * that is removed and created again.
 *
 * One region has N generations, which mergers fold into the table one by one. A version of the table is a number with a manifest,
 * published by put-if-absent: whoever puts a number first has it. data[v] is what version v contains: generations 1 to data[v],
 * applied in order; WRONG is anything else. prog[v] is the merge progress that its manifest records, parent[v] the version that it
 * was built on.
 *
 * Read publish first: what is asserted there holds for every version. Then Merger: a process of several steps, between any two of
 * which all others may run; its steps have the numbers of docs/protocol.md, "commit of progress". Each of the others is one step, which
 * may come at any moment. A merger that is killed begins again, or makes no further step. When every process has ended, the last
 * lines assert that nothing is left to merge. live[v] falls when an expiry deletes the manifest: then the number is free again.
 *
 * Searched in parts:
 *   A  two mergers
 *   B  a merger, and a compaction: pylance builds it, again whenever another version was published first; memwal-ops asks the
 *      indexes of each such version, and puts it. Its files are deleted if they answer worse
 *
 * Planted bugs (-DBUG=n), each with its part:
 *   1  (A) a merge is rebased over another merge, as by pylance's commit
 *   2  (A) progress is set by a second commit, after that of the data
 *   3  (A) a merge skips a generation that it cannot read
 *   4  (A) a commit of indexes writes the progress that it read when it began
 *   5  (A) a put is repeated after a lost response, at the next free number, without reading the name back
 *   6  (A) the base is recognized by its number, not by its content: the table was created again up to that number
 *   7  (A) the merger does not verify that what it published is in the history of the newest version
 *   8  (A) the table is created again between the last check and the put: a limit of the rules as they are, see README.md
 *   9  (B) the first version of a compaction is asked, and not those that pylance builds later, with a newer index
 *   10  (B) a compaction goes on after a put whose outcome is unknown: it is refused, its files go, and the put arrives
 */
#ifndef BUG
#define BUG 0
#endif
#define N 3
#ifdef PART_B
#define MERGERS 1
#define MOST 4
#else
#define MERGERS 2
#define MOST 5
#endif
#ifdef SHORT
#define V (MOST - 1)
#else
#define V MOST
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
byte running = MERGERS;
#ifdef PART_B
bool files = true;          /* those of the compaction exist */
bool uses[V+1], index[V+1]; /* the version names them; it has the index that the catchup built */
byte flight, fdata, fprog;  /* a put that has no response yet, and will arrive: its number, and what that version contains */
bool findex;
#endif

/* Publish version nv, with generations nd and progress np, built on version from. Always inside an atomic step. */
inline publish(nv, nd, np, from) {
    live[nv] = true; data[nv] = nd; prog[nv] = np; parent[nv] = from;
#ifdef PART_B
    uses[nv] = uses[from]; index[nv] = index[from];
#endif
    if
    :: nv > head ->
       assert(data[nv] != WRONG);                           /* no row twice, lost or revived */
       assert(data[nv] == prog[nv]);                        /* progress is never ahead of the data, nor behind it */
       assert(restored || prog[nv] >= prog[from]);          /* progress only rises, but by a restore */
       head = nv                                            /* last: the arguments are expressions */
    :: else -> late[nv] = true                              /* no reader opens it as the newest */
    fi
}
/* What a merge of generation g contains, computed from a version with the generations 1 to d. */
#define MERGED(d, g) (d == g - 1 -> g : WRONG)

active proctype Writer() {
    flushed == 1 -> flushed = N
}

/* v, p, t: the version that it reads, its progress, and which table that is; g: the generation to merge; n, m: data and progress
 * of what it publishes; mine: it knows that it did. Below "#if BUG" are planted bugs, the rule is in the last branch. */
active [MERGERS] proctype Merger() {
    byte v, g, p, n, m; bit t; bool mine, stale;
    do
    /* Steps 1 to 4: it reads the newest version, and builds the next one. */
    :: d_step { head < V && prog[head] < flushed -> v = head; p = prog[v]; g = p + 1; t = table; mine = false;
#if BUG == 3
        if :: g < flushed -> g++ :: else fi;
#endif
       }
       /* Step 5: v is still the newest, and it is the manifest that was read. */
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
          :: head < V -> n = MERGED(data[head], g); m = (prog[head] > g -> prog[head] : g); publish(head + 1, n, m, head); mine = true
          :: head == V
#elif BUG == 2
          :: !live[v+1] -> publish(v + 1, p, p, v); data[v+1] = g; mine = true
          :: live[v+1]
#else
          :: !live[v+1] -> n = MERGED(p, g); if :: table != t -> n = WRONG :: else fi;
             publish(v + 1, n, g, v);
             if :: mine = true :: mine = false fi
          :: live[v+1]
#endif
          :: true                                           /* the store refused, or the process was killed */
          fi }
#if BUG == 5
          if :: !mine -> atomic { if :: head < V -> n = MERGED(data[head], g); publish(head + 1, n, g, head) :: else fi } :: mine fi
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
#ifdef PART_B
             ; index[v + 1] = true
#endif
#endif
          :: else
          fi }
    :: head == V
    fi
}

#ifdef PART_B
/* The put of a compaction: all as in version nv - 1 when that was read. */
inline put_compaction(nv, nd, np, ni) {
    publish(nv, nd, np, nv - 1); index[nv] = ni; uses[nv] = true;
    assert(files)                                           /* no version names files that were deleted */
}
active proctype Compactor() {
    byte v, d, p, x; bool i, asked, with;                   /* whether its indexes were asked, and with which one */
    do
    :: d_step { head < V -> v = head + 1; d = data[head]; p = prog[head]; i = index[head] };
       if
#if BUG == 9
       :: !asked ->
#else
       :: !asked || with != i ->
#endif
          if
          :: asked = true; with = i
          :: d_step { files = false; x = 0; do :: x <= V -> assert(!uses[x]); x++ :: else -> break od; x = 0 }; break
          fi
       :: else
       fi;
       atomic {
          if
          :: !live[v] -> assert(with == i); put_compaction(v, d, p, i); break
          :: !live[v] && !flight -> flight = v; fdata = d; fprog = p; findex = i;   /* nothing is there: the outcome is unknown */
#if BUG != 10
             break
#endif
          :: live[v]                                        /* pylance builds it again, on the newest version */
          fi }
    :: head == V -> break
    od
}
active proctype Flight() {
end: atomic { flight -> if :: !live[flight] -> put_compaction(flight, fdata, fprog, findex) :: else fi; flight = 0; fdata = 0; fprog = 0; findex = false }
}
#endif

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

"""The names of all crash points in the code, in order (:mod:`stagereg.checkpoint.store.failpoints`)."""

POINTS = {
    "locked": "the run has locked the directory and changed nothing else",
    "swept": "leftovers of killed runs are deleted",
    "staged": "this rank's staged copy is complete",
    "made": "the hidden directory of the save exists",
    "agreed": "all ranks have staged and know which tensors they write; no file of the save exists",
    "writing": "a file is partly written",
    "flushed": "one file is flushed to disk; its size and checksum are known",
    "written": "this rank has written all of its files",
    "marked": "all ranks have written all files; all sizes and checksums are known",
    "held": "the run has checked that it still holds the directory lock",
    "described": "the manifest is written, in the hidden directory",
    "renamed": "the checkpoint has its name; the rename may not be durable yet",
    "committed": "the rename, or the manifest in an object store, is durable: the checkpoint is complete",
    "pointed": "``latest`` points to the checkpoint",
    "hidden": "an old checkpoint has a hidden name; its files still exist",
    "named": "a step that was saved again has its plain name, next to the name with the token",
    "repointed": "``latest`` points to the plain name",
    "retained": "old checkpoints are deleted",
    "ended": "every rank knows that the save is complete",
}
"""The crash points in order, with the last event before each. Only rank 0 reaches "locked", "swept", and "marked" to
"retained"."""

TIER_POINTS = {
    "part": "a rank's part is complete in the folder of one machine",
    "sending": "half of a part's blocks are sent to another machine",
    "receiving": "half of a part's blocks have arrived from another machine, with correct checksums",
    "received": "all blocks have arrived; the part is not complete on the receiving machine yet",
    "acknowledged": "the receiving machine has confirmed the part; the sender has not recorded the confirmation",
    "copied": "the sender has recorded the confirmation",
}
"""The crash points of a save to a tier. The receiving machine reaches "receiving", "received" and "part"."""

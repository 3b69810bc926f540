"""Where checkpoints lie: a directory or a bucket, who may write there, and which checkpoints stay.

Not to be taken for ``storage``, which makes the bytes of the files that a store has.
"""

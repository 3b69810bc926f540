"""Extensions: each folder can be deleted, and the core works without it. They import the core, and not each other."""

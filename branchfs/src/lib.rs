//! BranchFS: copy-on-write branches over an ordinary directory.

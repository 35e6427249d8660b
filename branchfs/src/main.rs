//! The `branchfs` program.
fn main() {}

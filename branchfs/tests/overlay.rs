//! The overlay driver: what holds of branches holds with it too, and what is its own.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]
#![allow(clippy::duplicate_mod, reason = "each module of the suite brings its own `common`")]

// The conformance suite: these modules find out by their path that they are here, see `common::driver`.
#[path = "branches.rs"]
mod branches;
#[path = "history.rs"]
mod history;
#[path = "model.rs"]
mod model;
#[path = "posix.rs"]
mod posix;
#[path = "programs.rs"]
mod programs;

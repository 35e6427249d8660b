//! Starts a command in a sandbox: the command sees one directory as its workspace, and little else.
//!
//! ```text
//! caller ── launcher ── init ── the command, and all that it starts
//! ```
//!
//! The caller runs `branchfs sandbox N`, where descriptor `N` holds a request as JSON (`request`). The launcher creates
//! the namespaces and waits (`launcher`). Init is the first process in them: it builds the view of the files
//! (`rootfs`), gives up all privileges (`privileges`), forks the process that becomes the command (`child`), and then
//! reaps orphans and forwards signals (`init`). When init ends, by itself or because the caller or the launcher has
//! died, the kernel kills everything in its process namespace.
//!
//! Every process here has one thread. This crate does not know what a branch is: it is told which directory to show,
//! where to show it, and what to hide.
//!
//! Text that may be any bytes (paths, arguments, the environment) is written in JSON with one character a byte, so
//! that names which are not UTF-8 arrive unchanged.

mod child;
mod descendants;
mod failure;
mod init;
mod launcher;
mod masked_files;
mod mount_table;
mod netns;
mod privileges;
mod request;
mod rootfs;
mod streams;
mod sys;

pub use launcher::run;

//! The control protocol, version 1: requests, replies and errors as types that the daemon and its clients share.
//!
//! A request and a reply are one line of JSON each. A request is an object with the fields `v` (the version), `verb`, and
//! those of the verb's struct here; other fields are ignored. A reply is `{"ok":…}` or `{"error":…}` ([`Reply`]).
//! `docs/control.md` describes every field for clients in other languages; the tests below compare its tables with
//! these types.

mod replies;
mod wire_path;

pub use replies::{
    Branch, BranchState, ByteCounts, Change, CommitReply, DiffReply, Difference, Empty, ErrorReply,
    Feature, ForgottenCommit, HistoryEntry, HistoryReply, InfoReply, LineCounts, ListReply,
    PruneReply, RebaseReply, Reply, RequestCounts, RevertReply, ShowReply,
};
pub use wire_path::WirePath;

pub use branchfs_core::diff::{ChangeKind, ChangedField};
pub use branchfs_core::error::ErrorKind;
pub use branchfs_core::transaction::ObjectKind;
pub use branchfs_core::workspace::{BranchRef, Policy};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The version of the protocol, the field `v` of a request.
pub const VERSION: u64 = 1;

/// Features in addition to those of the version.
pub const FEATURES: [&str; 7] =
    ["disk_limit", "rebase", "drop_rest", "whole", "lease", "import_lease", "clone_mount"];

/// The request of one verb, with the type of its reply.
pub trait Verb: Into<Request> {
    /// The verb as the protocol writes it.
    const NAME: &'static str;
    /// The reply if the request succeeds.
    type Reply: Serialize + DeserializeOwned;
}

/// Defines [`Request`] from the list of verbs: name, request and reply.
macro_rules! verbs {
    ($($name:literal $verb:ident -> $reply:ty;)*) => {
        /// Any request.
        #[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
        #[serde(tag = "verb")]
        pub enum Request {
            $(#[doc = concat!("The verb `", $name, "`.")] #[serde(rename = $name)] $verb($verb),)*
        }

        impl Request {
            /// The names of all verbs.
            pub const VERBS: &'static [&'static str] = &[$($name),*];

            /// The verb as the protocol writes it.
            #[must_use]
            pub fn verb(&self) -> &'static str {
                match self {
                    $(Self::$verb(_) => <$verb as Verb>::NAME,)*
                }
            }
        }

        $(
            impl Verb for $verb {
                const NAME: &'static str = $name;
                type Reply = $reply;
            }

            impl From<$verb> for Request {
                fn from(request: $verb) -> Self {
                    Self::$verb(request)
                }
            }
        )*
    };
}

verbs! {
    "info" Info -> InfoReply;
    "unmount" Unmount -> Empty;
    "create" Create -> Branch;
    "commit" Commit -> CommitReply;
    "rebase" Rebase -> RebaseReply;
    "abort" Abort -> Empty;
    "list" List -> ListReply;
    "diff" Diff -> DiffReply;
    "export" Export -> Empty;
    "import" Import -> Branch;
    "undo" Undo -> RevertReply;
    "redo" Redo -> RevertReply;
    "history" History -> HistoryReply;
    "show" Show -> ShowReply;
    "prune" Prune -> PruneReply;
    "requests" Requests -> RequestCounts;
    "clone_mount" CloneMount -> Empty;
}

/// Describes the mount.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Info {}

/// Ends the mount.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Unmount {}

/// Creates a branch.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Create {
    /// The name of the new branch.
    pub name: String,
    /// The branch to fork; main if absent.
    #[serde(default)]
    pub parent: Option<BranchRef>,
    /// How many bytes the branch may add; more than zero.
    #[serde(default)]
    pub disk_limit: Option<u64>,
    /// Writes the line `+ID NAME` to the descriptor of the request before the branch exists.
    #[serde(default)]
    pub lease: bool,
}

/// Commits a branch into its parent.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Commit {
    /// The branch to commit.
    pub branch: BranchRef,
    /// The policy for this commit; the mount's if absent.
    #[serde(default)]
    pub policy: Option<Policy>,
    /// Overwrites conflicting changes.
    #[serde(default)]
    pub force: bool,
    /// Leaves conflicting paths in the branch and commits the others.
    #[serde(default)]
    pub skip: bool,
    /// Rebases a stale branch first.
    #[serde(default)]
    pub rebase: bool,
    /// Commits only the paths that one of these patterns matches; all paths if empty.
    #[serde(default)]
    pub only: Vec<String>,
    /// Does not commit the paths that one of these patterns matches.
    #[serde(default)]
    pub exclude: Vec<String>,
    /// Drops the paths that are not committed, and closes the branch.
    #[serde(default)]
    pub drop_rest: bool,
    /// Reports what the commit would do, and changes nothing.
    #[serde(default)]
    pub dry_run: bool,
}

/// Forks a branch again from its parent's present state and keeps its changes.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Rebase {
    /// The branch to rebase.
    pub branch: BranchRef,
    /// Keeps the branch's version of conflicting paths.
    #[serde(default)]
    pub force: bool,
    /// Reports the conflicting paths, and changes nothing.
    #[serde(default)]
    pub dry_run: bool,
}

/// Drops a branch and the branches below it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Abort {
    /// The branch to abort.
    pub branch: BranchRef,
}

/// Lists the open branches.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct List {}

/// Compares a branch with its parent as it was at the fork.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Diff {
    /// The branch to compare.
    pub branch: BranchRef,
    /// Counts the changed lines of text files and the bytes of binary files.
    #[serde(default)]
    pub stat: bool,
    /// Writes a patch to the descriptor of the request instead of listing the changes.
    #[serde(default)]
    pub patch: bool,
}

/// Writes the changes of a branch as an archive to the descriptor of the request.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Export {
    /// The branch to export.
    pub branch: BranchRef,
    /// Writes all that the branch shows, as a layer over an empty directory.
    #[serde(default)]
    pub whole: bool,
    /// Patterns of the paths to leave out, with what is below them.
    #[serde(default)]
    pub exclude: Vec<String>,
}

/// Creates a branch from the archive that the descriptor of the request holds.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Import {
    /// The name of the new branch.
    pub name: String,
    /// The branch to fork; main if absent.
    #[serde(default)]
    pub parent: Option<BranchRef>,
    /// Makes the client's user (root: the owner of the base) the owner of everything.
    #[serde(default)]
    pub no_same_owner: bool,
    /// Imports over paths that have changed since the archive was written.
    #[serde(default)]
    pub force: bool,
    /// Writes the line `+ID NAME` to the second descriptor of the request before the branch exists.
    #[serde(default)]
    pub lease: bool,
}

/// Reverts the last commit into main.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Undo {
    /// The commit to undo; refused if it is not the last one.
    #[serde(default)]
    pub commit: Option<u64>,
    /// Overwrites later changes of the same paths, and makes open branches stale.
    #[serde(default)]
    pub force: bool,
    /// Reports what the undo would do, and changes nothing.
    #[serde(default)]
    pub dry_run: bool,
}

/// Applies the last undone commit again.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Redo {
    /// The commit to redo; refused if it is not the one that was undone last.
    #[serde(default)]
    pub commit: Option<u64>,
    /// Overwrites later changes of the same paths, and makes open branches stale.
    #[serde(default)]
    pub force: bool,
    /// Reports what the redo would do, and changes nothing.
    #[serde(default)]
    pub dry_run: bool,
}

/// Lists the commits that can be undone.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct History {}

/// Describes a commit of the history.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Show {
    /// The number of the commit.
    pub commit: u64,
}

/// Removes old commits from the history.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Prune {
    /// How many of the newest commits stay; none if absent.
    #[serde(default)]
    pub keep: Option<usize>,
}

/// Counts the requests of the kernel.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Requests {}

/// Sends a mount of a branch's directory that is attached nowhere. The client sends the socket for it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CloneMount {
    /// The branch.
    pub branch: BranchRef,
}

impl Request {
    /// Writes the request as a line.
    #[must_use]
    pub fn to_line(&self) -> String {
        #[derive(Serialize)]
        struct Versioned<'a> {
            v: u64,
            #[serde(flatten)]
            request: &'a Request,
        }
        to_line(&Versioned { v: VERSION, request: self })
    }

    /// The branch that the request is about, if it is about one that exists.
    #[must_use]
    pub fn branch(&self) -> Option<&BranchRef> {
        match self {
            Self::Commit(Commit { branch, .. })
            | Self::Rebase(Rebase { branch, .. })
            | Self::Abort(Abort { branch })
            | Self::Diff(Diff { branch, .. })
            | Self::Export(Export { branch, .. })
            | Self::CloneMount(CloneMount { branch }) => Some(branch),
            _ => None,
        }
    }
}

impl<T: Serialize> Reply<T> {
    /// Writes the reply as a line.
    #[must_use]
    pub fn to_line(&self) -> String {
        to_line(self)
    }
}

fn to_line(message: &impl Serialize) -> String {
    let mut line = serde_json::to_string(message).expect("a message has only string keys");
    line.push('\n');
    line
}

#[cfg(test)]
mod document_tests;

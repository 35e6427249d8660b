//! The replies of the daemon. Fields are in alphabetical order, which is their order on the wire.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{ChangeKind, ChangedField, ErrorKind, ObjectKind, Policy, WirePath};

/// The reply to a request.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reply<T> {
    /// The request succeeded.
    Ok(T),
    /// The request failed.
    Error(ErrorReply),
}

/// Why a request failed.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ErrorReply {
    /// What to do next.
    pub hint: Option<String>,
    /// Identifies the error and the state afterwards, for programs.
    pub kind: ErrorKind,
    /// Describes the error, for users.
    pub message: String,
    /// The path at which the operating system returned an error.
    pub path: Option<WirePath>,
    /// The conflicting paths, or the files that are open for writing.
    pub paths: Vec<WirePath>,
    /// The step of a transaction that failed at `path`.
    pub step: Option<Cow<'static, str>>,
}

/// The reply of a verb that returns nothing.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Empty {}

/// The reply to `info`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct InfoReply {
    /// The directory that the workspace branches from.
    pub base: WirePath,
    /// Whether branches contain control files.
    pub control_files: bool,
    /// The driver that presents the branches of main: "fuse" or "overlay".
    pub driver: Cow<'static, str>,
    /// Features in addition to those of the version.
    pub features: Vec<Cow<'static, str>>,
    /// The group of the base's owner.
    pub gid: u32,
    /// Where the workspace is mounted.
    pub mountpoint: WirePath,
    /// Whether the kernel reads and writes files without the daemon.
    pub passthrough: Feature,
    /// The process id of the daemon.
    pub pid: u32,
    /// The policy of the mount.
    pub policy: Policy,
    /// The directory of the store.
    pub store: WirePath,
    /// The user id of the base's owner.
    pub uid: u32,
    /// The version of the daemon's program.
    pub version: Cow<'static, str>,
    /// Why the other driver is not used.
    pub why_not: String,
}

/// Whether a feature of the mount is in use.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Feature {
    /// The feature is in use.
    pub on: bool,
    /// Why it is not in use.
    pub reason: Option<String>,
}

/// A branch. The reply to `create` and `import`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Branch {
    /// The names from main to the branch: `/main/a/b`.
    pub branch_path: String,
    /// When the branch was created, in seconds since 1970.
    pub created: f64,
    /// How many bytes the branch may add.
    pub disk_limit: Option<u64>,
    /// How many changes the limit has refused since the daemon started; null without a limit here or in a parent.
    pub disk_refusals: Option<u64>,
    /// The bytes of content that the branch and its children have added; null without a limit here or in a parent.
    pub disk_used: Option<u64>,
    /// The driver that presents the branch: "fuse" or "overlay".
    pub driver: Cow<'static, str>,
    /// The branch has live children.
    pub frozen: bool,
    /// In the reply to `import`: whether the archive contains a record of its base.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub has_base_record: Option<bool>,
    /// The branch's number, never reused.
    pub id: u64,
    /// The branch's name.
    pub name: String,
    /// The parent's number; 0 is main.
    pub parent: u64,
    /// The branch's directory.
    pub path: WirePath,
    /// Whether the branch can be committed.
    pub state: BranchState,
}

/// The state of an open branch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BranchState {
    /// The branch can be committed.
    Live,
    /// A sibling was committed first.
    Stale,
}

/// The reply to `commit`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CommitReply {
    /// The committed changes, sorted by path.
    pub changes: Vec<Change>,
    /// The number of the commit in the history; null if it cannot be undone.
    pub commit: Option<u64>,
    /// The commits that the history dropped to make room for this one.
    pub forgotten: Vec<ForgottenCommit>,
    /// How many changed paths stay in the branch.
    pub remaining: usize,
    /// The names of the siblings that are stale now.
    pub stale: Vec<String>,
}

/// A path that a transaction changed.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Change {
    /// What happened to the path.
    pub change: ChangeKind,
    /// The previous path of a renamed object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<WirePath>,
    /// The type of the object.
    pub kind: ObjectKind,
    /// The path.
    pub path: WirePath,
}

/// A commit that the history has dropped.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ForgottenCommit {
    /// The name of the branch that was committed.
    pub branch: String,
    /// The number of the commit.
    pub id: u64,
}

/// The reply to `rebase`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RebaseReply {
    /// The paths that both sides changed.
    pub conflicts: Vec<WirePath>,
}

/// The reply to `list`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ListReply {
    /// The open branches, oldest first.
    pub branches: Vec<Branch>,
}

/// The reply to `diff`.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct DiffReply {
    /// Without `patch`: the changes, sorted by path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changes: Option<Vec<Difference>>,
    /// With `patch`: how many changes a patch cannot represent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_out: Option<usize>,
}

/// A path at which a branch differs from its parent.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Difference {
    /// What differs in an object that exists on both sides; absent if it exists on one side only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aspects: Vec<ChangedField>,
    /// With `stat`, for a binary file: its sizes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<ByteCounts>,
    /// What happened to the path.
    pub change: ChangeKind,
    /// The previous path of a renamed object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<WirePath>,
    /// The type of the object, or of the deleted object.
    pub kind: ObjectKind,
    /// With `stat`, for a text file or a symbolic link: its changed lines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lines: Option<LineCounts>,
    /// The path; "." for the root of the workspace.
    pub path: WirePath,
}

/// How many lines of a text file changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LineCounts {
    /// Lines of the new file that are not in the old one.
    pub added: usize,
    /// Lines of the old file that are not in the new one.
    pub removed: usize,
}

/// The sizes of a binary file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ByteCounts {
    /// The size in the branch, in bytes.
    pub after: u64,
    /// The size in the parent, in bytes.
    pub before: u64,
}

/// The reply to `undo` and `redo`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RevertReply {
    /// The changes of main, sorted by path.
    pub changes: Vec<Change>,
    /// The commit that was undone or redone.
    pub entry: HistoryEntry,
    /// The names of the branches that are stale now.
    pub stale: Vec<String>,
}

/// The reply to `history`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct HistoryReply {
    /// The commits that can be undone, oldest first.
    pub entries: Vec<HistoryEntry>,
    /// The number of the newest commit that was removed from the history and not undone before; 0 if there is none.
    pub newest_pruned: u64,
}

/// The reply to `show`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ShowReply {
    /// The changes of the commit in main, sorted by path.
    pub changes: Vec<Change>,
    /// The commit.
    pub entry: HistoryEntry,
}

/// A commit in the history.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct HistoryEntry {
    /// The name of the branch that was committed.
    pub branch: String,
    /// The bytes on disk that are kept for the undo.
    pub bytes: u64,
    /// How many paths the commit changed.
    pub changes: usize,
    /// When it was committed, in seconds since 1970.
    pub committed: f64,
    /// The number of the commit.
    pub id: u64,
    /// When it was undone, in seconds since 1970; null if it was not undone.
    pub undone: Option<f64>,
}

/// The reply to `prune`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PruneReply {
    /// The bytes on disk that were freed.
    pub bytes: u64,
    /// How many commits were removed from the history.
    pub removed: usize,
}

/// The reply to `requests`: how many requests of each kind the kernel has sent since the mount.
pub type RequestCounts = BTreeMap<Cow<'static, str>, u64>;

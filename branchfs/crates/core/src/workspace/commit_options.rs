//! The options of a commit.

use super::{Policy, Workspace};
use crate::path_filter::PathFilter;

/// The options of a commit. By default all changes are committed, and conflicts are refused.
#[derive(Clone, Debug, Default)]
pub struct CommitOptions {
    /// Overwrite external changes.
    pub force: bool,
    /// Report what would change, and change nothing.
    pub dry_run: bool,
    /// The policy of this commit, if it is not that of the mount.
    pub policy: Option<Policy>,
    /// Skip paths that were changed externally, and commit the rest.
    pub skip: bool,
    /// The paths to commit; the branch keeps the rest.
    pub selection: PathFilter,
    /// Drop the rest together with the branch.
    pub drop_rest: bool,
    /// Rebase the branch first if a sibling was committed before; conflicts are detected by path.
    pub rebase: bool,
}

impl CommitOptions {
    /// Whether changes may stay in the branch.
    pub(super) fn keeps_rest(&self) -> bool {
        !self.drop_rest && (self.skip || !self.selection.is_all())
    }
}

/// The policy of a commit: the one of its options, or that of the mount.
pub(super) fn policy(workspace: &Workspace, options: &CommitOptions) -> Policy {
    options.policy.unwrap_or(workspace.store.settings.policy)
}

//! Carries out the requests of a connection: one method a verb.

use std::borrow::Cow;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::fd::AsFd;
use std::path::Path;

use super::MountInfo;
use super::connection::Connection;
use super::fd_passing;
use crate::filesystem::BranchFilesystem;
use crate::protocol::{
    self, Branch, BranchRef, BranchState, ByteCounts, Change, CommitReply, DiffReply, Difference,
    Empty, Feature, ForgottenCommit, HistoryEntry, HistoryReply, InfoReply, LineCounts, ListReply,
    ObjectKind, PruneReply, RebaseReply, Reply, Request, RequestCounts, RevertReply, ShowReply,
    Verb, WirePath,
};
use branchfs_core::archive::{self, OwnershipPolicy};
use branchfs_core::diff::{self, Reader, RenamedDirs, Statistics};
use branchfs_core::error::{Context, Error};
use branchfs_core::ids::directory_name;
use branchfs_core::overlayfs_mount::detached_mount;
use branchfs_core::path_filter::PathFilter;
use branchfs_core::transaction;
use branchfs_core::workspace::{
    BranchInfo, CommitOptions, MAIN_BRANCH, PastInfo, Resolution, UndoDirection, UndoResult,
    Workspace,
};

/// The requests of one connection.
pub(super) struct Handler<'h, 's> {
    pub(super) workspace: &'h Workspace,
    pub(super) filesystem: &'h BranchFilesystem,
    pub(super) mount: &'h MountInfo,
    pub(super) connection: &'h mut Connection<'s>,
}

/// Writes the reply to a request of the verb `V`.
fn reply<V: Verb>(outcome: Result<V::Reply, Error>) -> Result<String, Error> {
    outcome.map(|reply| Reply::Ok(reply).to_line())
}

impl Handler<'_, '_> {
    /// Carries out a request and returns the line of its reply.
    ///
    /// # Errors
    /// Those of the verb.
    pub(super) fn carry_out(&mut self, request: Request) -> Result<String, Error> {
        match request {
            Request::Info(_) => reply::<protocol::Info>(Ok(self.info())),
            Request::Unmount(_) => reply::<protocol::Unmount>(self.unmount()),
            Request::Create(request) => reply::<protocol::Create>(self.create(request)),
            Request::Commit(request) => reply::<protocol::Commit>(self.commit(&request)),
            Request::Rebase(request) => reply::<protocol::Rebase>(self.rebase(&request)),
            Request::Abort(request) => reply::<protocol::Abort>(self.abort(&request)),
            Request::List(_) => reply::<protocol::List>(self.list()),
            Request::Diff(request) => reply::<protocol::Diff>(self.diff(&request)),
            Request::Export(request) => reply::<protocol::Export>(self.export(&request)),
            Request::Import(request) => reply::<protocol::Import>(self.import(request)),
            Request::Undo(request) => {
                let protocol::Undo { commit, force, dry_run } = request;
                let reverted = self.workspace.revert(UndoDirection::Undo, commit, force, dry_run);
                reply::<protocol::Undo>(reverted.map(RevertReply::from))
            }
            Request::Redo(request) => {
                let protocol::Redo { commit, force, dry_run } = request;
                let reverted = self.workspace.revert(UndoDirection::Redo, commit, force, dry_run);
                reply::<protocol::Redo>(reverted.map(RevertReply::from))
            }
            Request::History(_) => reply::<protocol::History>(self.history()),
            Request::Show(request) => reply::<protocol::Show>(self.show(&request)),
            Request::Prune(request) => reply::<protocol::Prune>(self.prune(&request)),
            Request::Requests(_) => reply::<protocol::Requests>(Ok(self.requests())),
            Request::CloneMount(request) => {
                reply::<protocol::CloneMount>(self.clone_mount(&request))
            }
        }
    }

    fn info(&self) -> InfoReply {
        let (uid, gid) = self.workspace.owner();
        InfoReply {
            base: self.workspace.base().into(),
            control_files: self.mount.control_files,
            driver: self.mount.driver.into(),
            features: protocol::FEATURES.map(Cow::from).into(),
            gid,
            mountpoint: self.mount.mountpoint.as_path().into(),
            passthrough: feature(self.filesystem.passthrough.reason()),
            pid: std::process::id(),
            policy: self.mount.policy,
            store: self.workspace.store().into(),
            uid,
            version: env!("CARGO_PKG_VERSION").into(),
            why_not: self.mount.why_not.clone(),
        }
    }

    fn unmount(&self) -> Result<Empty, Error> {
        let mountpoint = &self.mount.mountpoint;
        self.workspace.unmount(&|| match branchfs_fuse::unmount(mountpoint, false) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Err(Error::MountInUse),
            other => other.at(mountpoint),
        })?;
        Ok(Empty {})
    }

    /// Creates a branch, with `lease` after its line was written to a file that the client sent.
    fn create(&mut self, request: protocol::Create) -> Result<Branch, Error> {
        let parent = request.parent.unwrap_or(BranchRef::Id(MAIN_BRANCH));
        if request.disk_limit == Some(0) {
            return Err(Error::Usage("a disk limit must be more than zero".to_owned()));
        }
        let protocol::Create { name, parent: _, disk_limit, lease } = request;
        if !lease {
            return Ok(self.branch(self.workspace.create_limited(&name, &parent, disk_limit)?));
        }
        let mut leases = self.file_of_leases()?;
        let created = self.workspace.create_leased(&name, &parent, disk_limit, &mut leases)?;
        Ok(self.branch(created))
    }

    fn file_of_leases(&mut self) -> Result<File, Error> {
        let leases = File::from(self.connection.descriptor("to write the lease to")?);
        if !leases.metadata().at("the file of leases")?.is_file() {
            return Err(Error::Usage("a lease can be written to a regular file only".to_owned()));
        }
        Ok(leases)
    }

    fn commit(&self, request: &protocol::Commit) -> Result<CommitReply, Error> {
        let options = CommitOptions {
            force: request.force,
            dry_run: request.dry_run,
            policy: request.policy,
            skip: request.skip,
            rebase: request.rebase,
            selection: PathFilter::new(&request.only, &request.exclude)?,
            drop_rest: request.drop_rest,
        };
        let committed = self.workspace.commit(&request.branch, &options)?;
        let forgotten = committed.forgotten.into_iter();
        Ok(CommitReply {
            changes: committed.changes.into_iter().map(Change::from).collect(),
            commit: committed.number,
            forgotten: forgotten
                .map(|commit| ForgottenCommit { branch: commit.branch, id: commit.id })
                .collect(),
            remaining: committed.remaining,
            stale: committed.stale,
        })
    }

    fn rebase(&self, request: &protocol::Rebase) -> Result<RebaseReply, Error> {
        let resolution = if request.force { Resolution::Override } else { Resolution::Refuse };
        let conflicts = self.workspace.rebase(&request.branch, resolution, request.dry_run)?;
        Ok(RebaseReply { conflicts: conflicts.into_iter().map(WirePath).collect() })
    }

    fn abort(&self, request: &protocol::Abort) -> Result<Empty, Error> {
        self.workspace.abort(&request.branch)?;
        Ok(Empty {})
    }

    fn list(&self) -> Result<ListReply, Error> {
        let branches = self.workspace.list()?.into_iter();
        Ok(ListReply { branches: branches.map(|branch| self.branch(branch)).collect() })
    }

    /// Compares a branch with its parent: a list, a list with line counts, or a patch. Reads content with the rights of
    /// the client's user.
    fn diff(&mut self, request: &protocol::Diff) -> Result<DiffReply, Error> {
        if request.patch {
            return self.patch(request);
        }
        let pairs = self.workspace.compare(&request.branch, RenamedDirs::Collapse)?;
        self.connection.peer.run_as(|| {
            let mut reader = Reader::default();
            let differences = diff::compare(pairs, &mut reader)?;
            let changes: Result<_, Error> = differences
                .iter()
                .map(|difference| describe(difference, request.stat, &mut reader))
                .collect();
            Ok(DiffReply { changes: Some(changes?), left_out: None })
        })
    }

    fn patch(&mut self, request: &protocol::Diff) -> Result<DiffReply, Error> {
        let output = File::from(self.connection.descriptor("to write the patch to")?);
        let pairs = self.workspace.compare(&request.branch, RenamedDirs::Expand)?;
        self.connection.peer.run_as(|| {
            let mut reader = Reader::default();
            let differences = diff::compare(pairs, &mut reader)?;
            let mut output = BufWriter::new(output);
            let left_out = diff::write_patch(&differences, &mut reader, &mut output)?;
            output.flush().at("the output")?;
            Ok(DiffReply { changes: None, left_out: Some(left_out) })
        })
    }

    /// Writes a branch as an archive. Reads content with the rights of the client's user.
    fn export(&mut self, request: &protocol::Export) -> Result<Empty, Error> {
        const BUFFER_BYTES: usize = 1 << 20;
        let output = File::from(self.connection.descriptor("to write the archive to")?);
        let selection = PathFilter::new(&[], &request.exclude)?;
        let mut pairs = if request.whole {
            self.workspace.view_of(&request.branch)?
        } else {
            self.workspace.compare(&request.branch, RenamedDirs::Expand)?
        };
        pairs.retain(|pair| selection.includes(pair.path()));
        self.connection.peer.run_as(|| {
            let mut output = BufWriter::with_capacity(BUFFER_BYTES, output);
            archive::export(pairs, &mut Reader::default(), &mut output)?;
            output.flush().at("the output")?;
            Ok(Empty {})
        })
    }

    /// Creates a branch from an archive. Creates no file that the client's user could not create.
    fn import(&mut self, request: protocol::Import) -> Result<Branch, Error> {
        let input = File::from(self.connection.descriptor("to read the archive from")?);
        let mut leases = request.lease.then(|| self.file_of_leases()).transpose()?;
        let parent = request.parent.unwrap_or(BranchRef::Id(MAIN_BRANCH));
        let peer = &self.connection.peer;
        let rights = match (request.no_same_owner, peer.is_privileged()) {
            (true, true) => {
                OwnershipPolicy::Given(self.workspace.owner().0, self.workspace.owner().1)
            }
            (true, false) => OwnershipPolicy::Given(peer.ids().0, peer.ids().1),
            (false, true) => OwnershipPolicy::All,
            (false, false) => OwnershipPolicy::Of(peer),
        };
        let protocol::Import { name, force, .. } = request;
        let (created, has_base_record) =
            self.workspace.import(&name, &parent, input, &rights, force, leases.as_mut())?;
        Ok(Branch { has_base_record: Some(has_base_record), ..self.branch(created) })
    }

    fn history(&self) -> Result<HistoryReply, Error> {
        let entries = self.workspace.history()?.into_iter();
        let entries = entries.map(HistoryEntry::from).collect();
        Ok(HistoryReply { entries, newest_pruned: self.workspace.newest_pruned()? })
    }

    fn show(&self, request: &protocol::Show) -> Result<ShowReply, Error> {
        let (entry, changes) = self.workspace.past_commit(request.commit)?;
        Ok(ShowReply {
            changes: changes.into_iter().map(Change::from).collect(),
            entry: entry.into(),
        })
    }

    fn prune(&self, request: &protocol::Prune) -> Result<PruneReply, Error> {
        let (removed, bytes) = self.workspace.prune(request.keep.unwrap_or(0))?;
        Ok(PruneReply { bytes, removed })
    }

    fn requests(&self) -> RequestCounts {
        let counted = self.filesystem.notifications.request_counts().into_iter();
        counted.map(|(kind, count)| (kind.into(), count)).collect()
    }

    /// Sends a mount of a branch's directory to a client that may not clone mounts itself.
    fn clone_mount(&mut self, request: &protocol::CloneMount) -> Result<Empty, Error> {
        let stream = self.connection.descriptor("to send the mount to")?;
        let id = self.workspace.lineage(&request.branch)?.into_iter().next();
        let name = id.and_then(|id| self.workspace.name_of(id));
        let name = name.ok_or_else(|| Error::NotFound(request.branch.to_string()))?;
        let path = self.mount.mountpoint.join(directory_name(&name));
        let mount = detached_mount(&path).at(&path)?;
        fd_passing::send(stream.as_fd(), mount.as_fd()).at("the socket of the client")?;
        Ok(Empty {})
    }

    fn branch(&self, branch: BranchInfo) -> Branch {
        Branch {
            branch_path: branch.branch_path,
            created: branch.created,
            disk_limit: branch.disk_limit,
            disk_refusals: branch.disk_refusals,
            disk_used: branch.disk_used,
            driver: self.workspace.driver_of(branch.id).into(),
            frozen: branch.is_frozen,
            has_base_record: None,
            id: branch.id,
            path: WirePath(self.mount.mountpoint.join(directory_name(&branch.name))),
            name: branch.name,
            parent: branch.parent,
            state: if branch.is_stale { BranchState::Stale } else { BranchState::Live },
        }
    }
}

/// Describes a feature of the mount by the reason why it is not in use; empty if it is.
fn feature(missing: &str) -> Feature {
    let on = missing.is_empty();
    Feature { on, reason: (!on).then(|| missing.to_owned()) }
}

fn describe(
    difference: &diff::Difference,
    with_statistics: bool,
    reader: &mut Reader,
) -> Result<Difference, Error> {
    let statistics = if with_statistics { diff::statistics(difference, reader)? } else { None };
    let (lines, bytes) = match statistics {
        Some(Statistics::Lines { added, removed }) => (Some(LineCounts { added, removed }), None),
        Some(Statistics::Bytes { before, after }) => (None, Some(ByteCounts { after, before })),
        None => (None, None),
    };
    let path = difference.path();
    let is_root = path.as_os_str().is_empty();
    Ok(Difference {
        aspects: difference.aspects.clone(),
        bytes,
        change: difference.change,
        from: difference.from().map(WirePath::from),
        kind: ObjectKind::from(difference.kind()),
        lines,
        path: if is_root { Path::new(".").into() } else { path.into() },
    })
}

impl From<transaction::Change> for Change {
    fn from(change: transaction::Change) -> Self {
        Self {
            change: change.change,
            from: change.from.map(WirePath),
            kind: change.kind,
            path: WirePath(change.path),
        }
    }
}

impl From<PastInfo> for HistoryEntry {
    fn from(past: PastInfo) -> Self {
        Self {
            branch: past.branch,
            bytes: past.bytes,
            changes: past.changes,
            committed: past.committed,
            id: past.id,
            undone: past.undone,
        }
    }
}

impl From<UndoResult> for RevertReply {
    fn from(reverted: UndoResult) -> Self {
        Self {
            changes: reverted.committed.changes.into_iter().map(Change::from).collect(),
            entry: reverted.entry.into(),
            stale: reverted.committed.stale,
        }
    }
}

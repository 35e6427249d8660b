//! The store of a workspace: its parts, the branch log, layers and trash.
//!
//! docs/format.md describes the files. [`super::store_directory`] creates, locks and removes the directory;
//! [`super::external_store`] says where its parts are.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FileType, Statx};

use super::background::Background;
use super::branch_log::{BranchLog, Line, Record};
use super::conflicts::CommittedChanges;
use super::ctime_log::CtimeLog;
use super::store_directory::{self, Lock, TimesGuard};
use super::tree_copy::TreeCopy;
use super::{Branch, BranchId, Branches, Policy, Settings, now};
use crate::driver::Driver;
use crate::error::{Context, Error};
use crate::ids::LayerId;
use crate::layer::Layer;
use crate::no_follow;
use crate::overlay::Namespace;
use crate::overlayfs_upper;
use crate::ownership;
use crate::rooted_dir::{RootedDir, remove_path};
use crate::transaction::{self, Change, Header, Kept, Kind, LoggedTransaction, TransactionRoots};
use crate::view::ChangedPaths;
use crate::write_set::{Read, ReadSet};

/// A snapshot layer that a transaction built, with the paths that views must look up again.
pub(super) type SnapshotLayer = (Arc<Layer>, Arc<ChangedPaths>);

/// The store. The branch log has a lock of its own; everything else is guarded by the locks of the verbs.
pub(super) struct Store {
    pub(super) base_path: PathBuf,
    pub(super) store_path: PathBuf,
    /// The directory of journal, history and snapshot layers: the store, or with an external store that in the base.
    pub(super) base_store_path: PathBuf,
    /// Whether the store's file system has its own inode numbers.
    pub(super) on_other_filesystem: bool,
    pub(super) owner: (u32, u32),
    pub(super) namespace: Namespace,
    /// The base as the lowest layer of branches; it is not written.
    pub(super) base: Arc<Layer>,
    pub(super) settings: Settings,
    pub(super) records: Arc<BranchLog>,
    pub(super) ctime_log: CtimeLog,
    pub(super) background: Background,
    pub(super) lock_file: Lock,
    /// Held as long as the store, with an external store.
    pub(super) _home_lock: Option<Lock>,
    /// The last number given to a branch, a layer or a transaction.
    pub(super) last_number: AtomicU64,
}

/// Copies of a branch's layers in the base, until a commit takes them.
pub(super) struct StagedLayers<'w> {
    pub(super) store: &'w Store,
    pub(super) layers: Vec<u64>,
}

impl StagedLayers<'_> {
    /// Hands the staged layers over to a commit that is being logged, which owns them from then on.
    pub(super) fn hand_over(mut self) -> Vec<u64> {
        std::mem::take(&mut self.layers)
    }
}

impl Drop for StagedLayers<'_> {
    fn drop(&mut self) {
        self.store.unstage(&self.layers);
    }
}

impl Store {
    /// Moves snapshot layers into the trash that no branch needs any more. Those in the stacks of branches stay.
    pub(super) fn drop_unused_snapshots(&self, branches: &Branches, below: &[u64]) {
        let is_used = |layer: &u64| {
            let mut records = branches.values().map(|other| &other.record);
            records.any(|other| other.layers.contains(layer) || other.lower_layers.contains(layer))
        };
        for layer in below.iter().filter(|layer| !is_used(layer)) {
            self.move_to_trash(&self.base_store_layer_path(*layer), "veil");
        }
    }

    /// Records the end of a branch, without a sync.
    pub(super) fn drop_record(&self, id: BranchId) -> Result<(), Error> {
        self.records.append(&[Line::Deleted { layer: id }])
    }

    pub(super) fn drop_journal(&self, id: BranchId) {
        self.move_to_trash(&self.base_store_path.join("journal").join(id.to_string()), "failed");
        self.empty_trash(); // where the disk was full, the next try needs the room
    }

    pub(super) fn trash_name(&self, what: &str, number: u64) -> PathBuf {
        Path::new("trash").join(format!("{what}-{number}-{}", now()))
    }

    /// Moves an object of the store into the trash. If that fails, it stays, without a reference to it, and the next
    /// start tries again.
    pub(super) fn move_to_trash(&self, path: &Path, what: &str) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let root = if path.starts_with(&self.base_store_path) {
            &self.base_store_path
        } else {
            &self.store_path
        };
        let to = root.join("trash").join(format!("{what}-{name}-{}", now()));
        let _ = no_follow::rename(path, &to);
    }

    /// Deletes the content of the trash in the background.
    pub(super) fn empty_trash(&self) {
        let mut trash = vec![self.base_store_path.join("trash")];
        trash.extend(self.is_external().then(|| self.store_path.join("trash")));
        self.background.empty(trash, self.ctime_log.unlinker());
    }

    /// Opens a branch's own layer, which need not be on disk.
    pub(super) fn open_layer(&self, id: u64) -> Result<Layer, Error> {
        let path = self.layer_path(id);
        self.configure(Layer::open(LayerId(id), &path, self.namespace, self.on_other_filesystem)?)
    }

    fn configure(&self, mut layer: Layer) -> Result<Layer, Error> {
        if self.settings.policy == Policy::Serializable {
            layer.record_reads()?;
        }
        layer.set_observer(self.records.clone());
        Ok(layer)
    }

    /// The layer of a new branch, `is_on_disk` or not.
    pub(super) fn new_layer(
        &self,
        id: u64,
        is_on_disk: bool,
        below: &[Arc<Layer>],
    ) -> Result<Layer, Error> {
        if is_on_disk {
            // Belongs to no branch until the record is written; a crash leaves no data of a user.
            self.records.append(&[Line::Deleted { layer: id }])?;
        }
        let path = self.layer_path(id);
        let layer =
            Layer::not_created(LayerId(id), &path, self.namespace, self.on_other_filesystem);
        let layer = self.configure(layer)?;
        if is_on_disk {
            let below = below.iter().find(|layer| layer.is_created()).expect("the base is there");
            layer.create(&below.tree).at(&path)?;
        }
        Ok(layer)
    }

    /// Numbers grow with the clock, so that none is used twice over restarts.
    pub(super) fn next_number(&self) -> u64 {
        let clock = u64::try_from(now() / 1_000_000).unwrap_or(0);
        let next = |last: u64| Some(clock.max(last + 1));
        let last = self.last_number.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        last.map_or(clock, |last| clock.max(last + 1))
    }

    /// Committed files have one link too many as long as the layer has a link.
    pub(super) fn unlink_kept(&self, layers: &[u64]) -> Result<(), Error> {
        for layer in layers {
            overlayfs_upper::drop_index(&self.layer_path(*layer))?;
            let links = self.layer_path(*layer).join("links");
            remove_path(&links).at(&links)?;
        }
        Ok(())
    }

    /// Whether the kernel wrote the branch's layer.
    pub(super) fn is_written_by_overlayfs(&self, branch: &Branch) -> Result<bool, Error> {
        for layer in &branch.record.layers {
            if overlayfs_upper::is_written_by_overlayfs(&self.layer_path(*layer))? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether the store is external: then journal and history are not in it.
    pub(super) fn is_external(&self) -> bool {
        self.base_store_path != self.store_path
    }

    /// The directory of a snapshot layer or a staged layer.
    pub(super) fn base_store_layer_path(&self, layer: u64) -> PathBuf {
        self.base_store_path.join("layers").join(layer.to_string())
    }

    /// Copies the layers to commit to the base's file system if the store is on another one. The branch is frozen
    /// meanwhile. Copies the content of the changed files.
    pub(super) fn stage(
        &self,
        driver: &dyn Driver,
        id: BranchId,
        record: &Record,
    ) -> Result<StagedLayers<'_>, Error> {
        let mut staged = StagedLayers { store: self, layers: Vec::new() };
        if !self.is_external() {
            return Ok(staged);
        }
        driver.convert(id)?;
        for layer in &record.layers {
            let (from, to) = (self.layer_path(*layer), self.base_store_layer_path(*layer));
            remove_path(&to).at(&to)?;
            staged.layers.push(*layer);
            self.make_directory(&to)?;
            let (from, to) = (from.join("upper"), to.join("upper"));
            self.make_directory(&to)?;
            let open = |path: &Path| RootedDir::open_root(path).at(path);
            let mut copier = TreeCopy::new(open(&from)?, open(&to)?);
            let copied = copier.all();
            copied.at(self.base_path.join(&copier.current))?;
        }
        Ok(staged)
    }

    /// Removes copies that were not committed.
    pub(super) fn unstage(&self, layers: &[u64]) {
        for layer in layers {
            self.move_to_trash(&self.base_store_layer_path(*layer), "staged");
        }
        if !layers.is_empty() {
            self.empty_trash();
        }
    }

    /// Makes the whole store durable.
    pub(super) fn sync_store(&self) -> Result<(), Error> {
        let path = &self.store_path;
        let opened = no_follow::open_directory(path).at(path)?;
        rustix::fs::syncfs(opened.as_fd()).or_not_durable(path)
    }

    /// Removes such a layer. Its files are links to those of the branch, whose link counts decrease.
    pub(super) fn remove_rest(&self, id: u64) {
        let path = self.layer_path(id);
        if remove_path(&path).is_err() {
            self.move_to_trash(&path, "unmade"); // or the next mount does
            self.empty_trash();
        }
    }

    /// Ends the use of a committed branch's layers outside the base. Can be repeated.
    pub(super) fn release_layers(&self, decided: &LoggedTransaction) -> Result<(), Error> {
        let header = &decided.header;
        if let Some(kept) = &header.rest {
            self.unlink_rest(decided, kept)?;
        }
        self.unlink_kept(&header.layers)?;
        if self.is_external() && matches!(header.kind, Kind::Commit { .. }) {
            // The base has got copies.
            header
                .layers
                .iter()
                .for_each(|layer| self.move_to_trash(&self.layer_path(*layer), "layer"));
        }
        Ok(())
    }

    /// Removes the names in the old layers of the objects in the rest, and of objects that the base has under another
    /// name.
    fn unlink_rest(&self, decided: &LoggedTransaction, kept: &Kept) -> Result<(), Error> {
        let mut linked = HashSet::new();
        visit(&self.layer_path(kept.layer).join("upper"), &mut |_, _, stat| {
            if stat.stx_nlink > 1 {
                linked.insert(stat.stx_ino);
            }
            Ok(())
        })?;
        let split: HashSet<u64> = kept.split.iter().copied().collect();
        let layers = || decided.header.layers.iter();
        let committed = layers().map(|layer| self.base_store_layer_path(*layer).join("upper"));
        let aside = decided.set_aside().map(|place| self.base_store_path.join(place));
        let committed: Vec<PathBuf> = committed.chain(aside).collect();
        if !self.is_external() {
            return unlink_all(&committed, &linked.union(&split).copied().collect());
        }
        let own: Vec<PathBuf> =
            layers().map(|layer| self.layer_path(*layer).join("upper")).collect();
        unlink_all(&own, &linked)?;
        unlink_all(&committed, &split)
    }

    /// Builds the snapshot layer `id` of an applied transaction. Removes first what a crash left of it.
    pub(super) fn build_snapshot_layer(
        &self,
        disk: &TransactionRoots,
        decided: &LoggedTransaction,
        id: u64,
    ) -> Result<SnapshotLayer, Error> {
        let path = self.base_store_layer_path(id);
        remove_path(&path).at(&path)?;
        for directory in ["", "upper"] {
            self.make_directory(&path.join(directory))?;
        }
        let layer = Layer::open_snapshot(LayerId(id), &path, self.namespace)?;
        let changed_paths = transaction::build_snapshot_layer(disk, decided, &layer)?;
        let changes = path.join("changes");
        let text = serde_json::to_vec(&decided.changes)
            .map_err(|error| Error::Corrupt(error.to_string()))?;
        no_follow::write(&changes, &text).at(&changes)?;
        ownership::set(&changes, self.owner).at(&changes)?;
        Ok((Arc::new(layer), Arc::new(changed_paths)))
    }

    /// Updates only the records, after a crash.
    pub(super) fn restack_records(
        &self,
        records: &mut BTreeMap<BranchId, Record>,
        disk: &TransactionRoots,
        decided: &LoggedTransaction,
    ) -> Result<(), Error> {
        let header = &decided.header;
        if let Some(snapshot_layer) = header.snapshot_layer {
            self.build_snapshot_layer(disk, decided, snapshot_layer)?;
            for id in &header.readers {
                if let Some(record) =
                    records.get_mut(id).filter(|one| !one.lower_layers.contains(&snapshot_layer))
                {
                    record.lower_layers.push(snapshot_layer);
                }
            }
        }
        for id in &header.resumed {
            if let Some(record) = records.get_mut(id) {
                record.lower_layers.retain(|layer| Some(*layer) != header.dropped_snapshot);
            }
        }
        Ok(())
    }

    /// Removes a snapshot layer at once when no branch needs it any more: it shares objects with the base, whose link
    /// counts are right only then.
    pub(super) fn drop_snapshot(&self, branches: &Branches, header: &Header) -> Result<(), Error> {
        let Some(dropped_snapshot) = header.dropped_snapshot else { return Ok(()) };
        if branches.values().any(|branch| branch.record.lower_layers.contains(&dropped_snapshot)) {
            return Ok(());
        }
        let path = self.base_store_layer_path(dropped_snapshot);
        remove_path(&path).at(&path)
    }

    /// The snapshot layers in a branch's stack, top first: directories in the store.
    pub(super) fn snapshot_layers_of(&self, record: &Record) -> Vec<PathBuf> {
        let is_veil = |layer: &&u64| {
            no_follow::exists(&self.base_store_layer_path(**layer).join("changes")).unwrap_or(false)
        };
        let upper = |layer: &u64| Path::new("layers").join(layer.to_string()).join("upper");
        record.lower_layers.iter().filter(is_veil).map(upper).collect()
    }

    /// The changes that were committed to main since a branch was forked.
    pub(super) fn committed_changes_of(&self, record: &Record) -> Result<CommittedChanges, Error> {
        let mut theirs = CommittedChanges::default();
        for layer in &record.lower_layers {
            let path = self.base_store_layer_path(*layer).join("changes");
            let text = match no_follow::read(&path) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue, // not a snapshot layer
                other => other.at(&path)?,
            };
            let changes: Vec<Change> = serde_json::from_slice(&text)
                .map_err(|error| Error::Corrupt(format!("{}: {error}", path.display())))?;
            theirs.add(&changes);
        }
        Ok(theirs)
    }

    /// The read set of a branch.
    pub(super) fn reads(&self, record: &Record) -> Result<Vec<(PathBuf, Read)>, Error> {
        let mut reads = Vec::new();
        for layer in &record.layers {
            let path = self.layer_path(*layer).join("reads");
            if !no_follow::exists(&path).at(&path)? {
                return Err(Error::Unsupported(format!(
                    "what branch {} read was not recorded: mount with the policy serializable before it is forked",
                    record.name
                )));
            }
            reads.extend(ReadSet::load(&path).at(&path)?);
        }
        Ok(reads)
    }

    pub(super) fn layer_path(&self, layer: u64) -> PathBuf {
        self.store_path.join("layers").join(layer.to_string())
    }

    /// Writes branch records to the log and syncs it.
    pub(super) fn write_records<'r>(
        &self,
        records: impl IntoIterator<Item = &'r Record>,
    ) -> Result<(), Error> {
        self.records.append(&records.into_iter().map(Line::of).collect::<Vec<_>>())?;
        self.records.sync()
    }

    pub(super) fn make_directory(&self, path: &Path) -> Result<(), Error> {
        no_follow::make_directory(path).at(path)?;
        ownership::set(path, self.owner).at(path)
    }

    /// Marks the end of a mount in the lock file.
    pub(super) fn mark_closed(&self) -> Result<(), Error> {
        store_directory::mark_closed(&self.lock_file).at(&self.store_path)
    }

    /// Removes a store without branches, unless something in it is still needed.
    pub(super) fn remove_if_unused(&self) -> Result<(), Error> {
        let keeps = |root: &Path, name: &str| match no_follow::names(&root.join(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            names => names.at(root).map(|names| !names.is_empty()),
        };
        self.records.clear()?;
        // Layers of damaged branches, and logs that are kept after their branches.
        if keeps(&self.store_path, "lost")?
            || no_follow::exists(&self.store_path.join("logs/kept")).unwrap_or(true)
        {
            return Ok(());
        }
        let keep = TimesGuard::of(&self.base_path)?;
        let wait = store_directory::TRASH_WAIT_MAX;
        if self.is_external() {
            if !store_directory::remove_in_time(&self.store_path, wait)? {
                return Ok(());
            }
            let link = self.base_store_path.join("store");
            no_follow::remove_file(&link).at(&link)?;
        }
        // A transaction to be recovered at the next start, or a commit that can be undone.
        if keeps(&self.base_store_path, "journal")? || keeps(&self.base_store_path, "history")? {
            return Ok(());
        }
        store_directory::remove_in_time(&self.base_store_path, wait)?;
        keep.restore()
    }
}

/// Removes all names at, or below, some paths of objects with these inode numbers.
pub(super) fn unlink_all(places: &[PathBuf], inos: &HashSet<u64>) -> Result<(), Error> {
    if inos.is_empty() {
        return Ok(());
    }
    let mut unlink =
        |tree: &RootedDir, path: &Path, stat: &Statx| match inos.contains(&stat.stx_ino) {
            true => tree.remove_file(path).at(path),
            false => Ok(()),
        };
    places.iter().try_for_each(|place| visit(place, &mut unlink))
}

/// Visits all objects other than directories at or below `place`, which may not exist.
pub(super) fn visit(
    place: &Path,
    each: &mut dyn FnMut(&RootedDir, &Path, &Statx) -> Result<(), Error>,
) -> Result<(), Error> {
    let (Some(parent), Some(name)) = (place.parent(), place.file_name()) else { return Ok(()) };
    let tree = match RootedDir::open_root(parent) {
        Err(rustix::io::Errno::NOENT) => return Ok(()),
        other => other.at(parent)?,
    };
    let mut pending = vec![PathBuf::from(name)];
    while let Some(path) = pending.pop() {
        let stat = match tree.stat(&path) {
            Err(rustix::io::Errno::NOENT) => continue,
            other => other.at(&path)?,
        };
        if FileType::from_raw_mode(u32::from(stat.stx_mode)) == FileType::Directory {
            let entries = tree.list(&path).at(&path)?;
            pending.extend(entries.into_iter().map(|entry| path.join(entry.name)));
        } else {
            each(&tree, &path, &stat)?;
        }
    }
    Ok(())
}

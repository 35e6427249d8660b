//! Invalidation of the kernel's caches. No lock is held meanwhile: the kernel may be waiting for an answer.

use std::ffi::OsStr;
use std::sync::atomic::Ordering;

use super::{MAIN, Mount, MountedBranch, ViewId};
use crate::view::{NodeIndex, ROOT};

/// The kernel's caches of the answers of views: names, attributes, content.
///
/// An invalidation that finds nothing, or fails, does no harm: the kernel has dropped the object already.
pub trait KernelCache: Send + Sync {
    /// Invalidates the attributes and the content of a node.
    fn invalidate_node(&self, slot: ViewId, index: NodeIndex);
    /// Invalidates a name in a directory, and all names below it.
    fn invalidate_entry(&self, slot: ViewId, parent: NodeIndex, name: &OsStr);
    /// Makes the kernel look up a name again at its next use.
    fn expire_entry(&self, slot: ViewId, parent: NodeIndex, name: &OsStr);
    /// Invalidates all names of the mount, if the kernel supports it.
    fn increment_epoch(&self);
}

impl Mount {
    /// Invalidates a branch in the kernel's caches: `/@name` with all names below it, which the kernel removes together with
    /// mounts on them, and the attributes of open files. Other names are not invalidated, because mounts may cover files of
    /// other branches. Must be called without locks. Cost: one notification for each node that the kernel knows.
    pub(crate) fn invalidate(&self, mounted: &MountedBranch) {
        let Some(kernel) = self.kernel.get() else {
            return;
        };
        for (slot, name) in mounted.places() {
            kernel.invalidate_entry(slot, ROOT, &name);
        }
        let nodes: Vec<_> =
            mounted.lock_as_it_is().tree.nodes.all().map(|(index, _)| index).collect();
        for index in nodes {
            kernel.invalidate_node(mounted.slot, index);
        }
    }

    /// As [`Self::invalidate`], one name after the other, from the bottom up. Invalidating the top name of a big branch
    /// occupies a processor for milliseconds in the kernel, and delays threads that wake up there, such as the one that
    /// waits for the reply. Cost: one more notification for each name.
    pub(crate) fn invalidate_in_steps(&self, mounted: &MountedBranch) {
        if let Some(kernel) = self.kernel.get() {
            let mut known: Vec<_> = {
                let view = mounted.lock_as_it_is();
                view.tree.nodes.all().map(|(index, node)| (index, node.names.clone())).collect()
            };
            // What is below something was mostly looked up after it.
            known.sort_unstable_by_key(|(index, _)| std::cmp::Reverse(*index));
            for (parent, name) in known.into_iter().flat_map(|(_, names)| names) {
                kernel.invalidate_entry(mounted.slot, parent, &name);
            }
        }
        self.invalidate(mounted);
    }

    /// Makes the kernel look up `/@name` again, so that a path into the branch fails. The cost does not depend on the size
    /// of the branch. [`Self::invalidate_in_steps`] must follow.
    pub(crate) fn expire(&self, mounted: &MountedBranch) {
        for (slot, name) in mounted.places() {
            if let Some(kernel) = self.kernel.get() {
                kernel.expire_entry(slot, ROOT, &name);
            }
        }
    }

    /// From now on branches are covered by other mounts, which the kernel removes with the names below them. So the epoch
    /// must not be increased, which would invalidate all names.
    pub fn disable_epoch(&self) {
        self.has_covers.store(true, Ordering::Relaxed);
    }

    /// Makes the kernel drop its cache of main's root after a commit. The rest of main is not cached.
    pub(crate) fn invalidate_main(&self) {
        if let Some(kernel) = self.kernel.get() {
            kernel.invalidate_node(MAIN, ROOT);
        }
    }

    /// Makes the kernel drop what a commit into this branch made out of date.
    pub(crate) fn invalidate_outdated(&self, slot: ViewId, outdated: &[crate::view::Outdated]) {
        let Some(kernel) = self.kernel.get() else {
            return;
        };
        // Missing names are cached, too, and are not recorded here: only a new epoch invalidates them.
        if !self.has_covers() {
            kernel.increment_epoch(); // where it cannot, absence is not cached
        }
        for (index, name) in outdated {
            if let Some((parent, name)) = name {
                kernel.invalidate_entry(slot, *parent, name);
            }
            kernel.invalidate_node(slot, *index);
        }
    }

    /// Whether branches are covered by other mounts.
    pub fn has_covers(&self) -> bool {
        self.has_covers.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::{OsStr, OsString};
    use std::sync::{Arc, Mutex};

    use rustix::fs::FileType;

    use super::*;
    use crate::layer::Layer;
    use crate::rooted_dir::RootedDir;
    use crate::view::NodeLocation;

    /// Records the invalidated names.
    #[derive(Default)]
    struct Told(Mutex<Vec<OsString>>);

    impl KernelCache for Told {
        fn invalidate_node(&self, _slot: ViewId, _index: NodeIndex) {}

        fn invalidate_entry(&self, _slot: ViewId, _parent: NodeIndex, name: &OsStr) {
            self.0.lock().unwrap().push(name.to_owned());
        }

        fn expire_entry(&self, _slot: ViewId, _parent: NodeIndex, _name: &OsStr) {}

        fn increment_epoch(&self) {}
    }

    #[test]
    fn a_big_branch_is_forgotten_name_by_name_and_its_own_name_last() {
        let directory = tempfile::tempdir().unwrap();
        let base = Arc::new(Layer::base(RootedDir::open_root(directory.path()).unwrap()));
        let mount = Mount::new(Arc::clone(&base));
        let told = Arc::new(Told::default());
        mount.connect(Arc::clone(&told) as Arc<dyn KernelCache>);
        let slot = mount.add(OsStr::new("branch"), MAIN, vec![base]);
        let mounted = mount.mounted(slot).unwrap();
        {
            let nodes = &mut mounted.lock().tree.nodes;
            let folder = nodes.add(FileType::Directory, NodeLocation::Upper, None);
            nodes.name(folder, ROOT, OsStr::new("folder"));
            for name in ["one", "two"] {
                let file = nodes.add(FileType::RegularFile, NodeLocation::Upper, None);
                nodes.name(file, folder, OsStr::new(name));
            }
        }
        mount.invalidate_in_steps(&mounted);
        assert_eq!(*told.0.lock().unwrap(), ["two", "one", "folder", "@branch"]);
    }
}

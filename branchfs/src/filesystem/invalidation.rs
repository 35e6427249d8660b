//! What the kernel is told to forget. Nothing is locked meanwhile: it may be waiting for an answer.

use std::sync::atomic::Ordering;

use super::{BranchFilesystem, INDEX_BITS, MAIN, Mounted, Slot};
use crate::scheduling::let_others;
use crate::view::ROOT;
use branchfs_fuse::NodeId;

impl BranchFilesystem {
    /// Tells the kernel that a branch's answers are outdated: `/@name` with all names below it, which the kernel takes away
    /// itself, mounts on them too, and the attributes of what somebody still has open. Names elsewhere keep their life: other
    /// branches' files may be covered by mounts. Called without any lock held. Cost: one notification for each node that the
    /// kernel knows.
    pub(crate) fn invalidate(&self, mounted: &Mounted) {
        let Some(kernel) = self.kernel.get() else {
            return;
        };
        // The kernel may have forgotten all of it by itself: nothing is lost when an invalidation finds nothing.
        for (root, name) in mounted.places() {
            let _ = kernel.invalidate_entry(root, &name);
        }
        let nodes: Vec<_> = mounted.lock_as_it_is().nodes.all().map(|(index, _)| index).collect();
        for index in nodes {
            let _ = kernel.invalidate_node(NodeId(mounted.slot << INDEX_BITS | index));
        }
    }

    /// As [`Self::invalidate`], one name after the other, from the bottom up: taking a big branch away with its one name holds a
    /// processor for milliseconds, in the kernel and past whoever is woken on it meanwhile, were it for the answer that the branch
    /// is gone. Cost: one more notification for each name.
    pub(crate) fn invalidate_in_steps(&self, mounted: &Mounted) {
        if let Some(kernel) = self.kernel.get() {
            let mut known: Vec<_> = {
                let view = mounted.lock_as_it_is();
                view.nodes.all().map(|(index, node)| (index, node.names.clone())).collect()
            };
            // What is below something was mostly looked up after it.
            known.sort_unstable_by_key(|(index, _)| std::cmp::Reverse(*index));
            for (parent, name) in known.into_iter().flat_map(|(_, names)| names) {
                let _ = kernel.invalidate_entry(NodeId(mounted.slot << INDEX_BITS | parent), &name);
                let_others();
            }
        }
        self.invalidate(mounted);
    }

    /// Lets the kernel ask again for `/@name`, at a cost that does not depend on what it knows below: who goes there by a path
    /// learns that the branch is gone. [`Self::invalidate_in_steps`] is to follow.
    pub(crate) fn expire(&self, mounted: &Mounted) {
        for (root, name) in mounted.places() {
            if let Some(kernel) = self.kernel.get() {
                let _ = kernel.expire_entry(root, &name); // as above
            }
        }
    }

    /// From now on branches are covered by other mounts, which the kernel takes away with the names they lie on: no
    /// epoch may end the life of all names at once.
    pub(crate) fn expect_covers(&self) {
        self.has_covers.store(true, Ordering::Relaxed);
    }

    /// Lets the kernel forget what it keeps of main's root after a commit; the rest of main is asked for each time.
    pub(crate) fn invalidate_main(&self) {
        if let Some(kernel) = self.kernel.get() {
            let _ = kernel.invalidate_node(NodeId(MAIN << INDEX_BITS | ROOT)); // forgotten already: as good
        }
    }

    /// Lets the kernel forget what a commit into this branch has outdated.
    pub(crate) fn invalidate_outdated(&self, slot: Slot, outdated: &[crate::view::Outdated]) {
        let Some(kernel) = self.kernel.get() else {
            return;
        };
        // Names that did not exist are cached too and known to nobody here: only an epoch reaches them.
        if !self.has_covers.load(Ordering::Relaxed) {
            let _ = kernel.increment_epoch(); // where it cannot, absence is not cached
        }
        for (index, name) in outdated {
            if let Some((parent, name)) = name {
                let _ = kernel.invalidate_entry(NodeId(slot << INDEX_BITS | parent), name);
            }
            let _ = kernel.invalidate_node(NodeId(slot << INDEX_BITS | index));
        }
    }

    /// Names that are absent may be remembered by the kernel only if it can be made to forget all of them at once.
    pub(super) fn may_cache_absence(&self, mounted: &Mounted) -> bool {
        mounted.slot != MAIN
            && !self.has_covers.load(Ordering::Relaxed)
            && self.capabilities.get().is_some_and(|capabilities| capabilities.epoch)
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::{OsStr, OsString};
    use std::os::fd::BorrowedFd;
    use std::path::Path;
    use std::sync::{Arc, Mutex};

    use rustix::fs::FileType;
    use rustix::io::Errno;

    use super::*;
    use crate::layer::Layer;
    use crate::tree::Tree;
    use crate::view::Place;
    use branchfs_fuse::{BackingId, FsResult, KernelNotifier};

    /// Keeps the names that it is told to forget.
    #[derive(Default)]
    struct Told(Mutex<Vec<OsString>>);

    impl KernelNotifier for Told {
        fn invalidate_node(&self, _node: NodeId) -> FsResult<()> {
            Ok(())
        }

        fn invalidate_entry(&self, _parent: NodeId, name: &OsStr) -> FsResult<()> {
            self.0.lock().unwrap().push(name.to_owned());
            Ok(())
        }

        fn expire_entry(&self, _parent: NodeId, _name: &OsStr) -> FsResult<()> {
            Ok(())
        }

        fn increment_epoch(&self) -> FsResult<()> {
            Err(Errno::NOSYS)
        }

        fn invalidate_attributes(&self, _node: NodeId) -> FsResult<()> {
            Ok(())
        }

        fn store(&self, _node: NodeId, _content: &[u8]) -> FsResult<()> {
            Ok(())
        }

        fn open_backing(&self, _file: BorrowedFd<'_>) -> FsResult<BackingId> {
            Err(Errno::PERM)
        }

        fn close_backing(&self, _backing: BackingId) {}

        fn request_counts(&self) -> Vec<(&'static str, u64)> {
            Vec::new()
        }
    }

    #[test]
    fn a_big_branch_is_forgotten_name_by_name_and_its_own_name_last() {
        let directory = tempfile::tempdir().unwrap();
        let base = Arc::new(Layer::base(Tree::open_root(directory.path()).unwrap()));
        let filesystem = BranchFilesystem::new(Arc::clone(&base));
        let told = Arc::new(Told::default());
        filesystem.connect(Arc::clone(&told) as Arc<dyn KernelNotifier>, Path::new(""), &[]);
        let slot = filesystem.add(OsStr::new("branch"), MAIN, vec![base]);
        let mounted = filesystem.mounted(slot).unwrap();
        {
            let nodes = &mut mounted.lock().nodes;
            let folder = nodes.add(FileType::Directory, Place::Upper, None);
            nodes.name(folder, ROOT, OsStr::new("folder"));
            for name in ["one", "two"] {
                let file = nodes.add(FileType::RegularFile, Place::Upper, None);
                nodes.name(file, folder, OsStr::new(name));
            }
        }
        filesystem.invalidate_in_steps(&mounted);
        assert_eq!(*told.0.lock().unwrap(), ["two", "one", "folder", "@branch"]);
    }
}

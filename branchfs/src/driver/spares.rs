//! Branches made ahead: what a create waits for longest is the layer and the kernel's file system over it.
//!
//! A spare is both, with nobody looking: `layers/spare-N` in the store, and an overlayfs that is mounted nowhere. A create
//! gives the layer its branch's number and mounts the file system. What a spare shows is the base as it is when somebody
//! looks, for the kernel knows nothing of it but the root until then; the attributes of that are a copy, made again by
//! whoever takes the spare. It is read-only until then: the end of any other syncs the whole file system of the store.
//!
//! One thread makes them, after those that somebody waits for. It keeps one, and with every create twice as many, up to
//! [`KEPT_MAX`]: who forks once pays for little, who forks many finds them ready. A create that finds none makes what it
//! needs. A spare costs a descriptor, a file system in the kernel's memory and six inodes of the store. Those of a daemon that
//! was killed are layers without a number, which the next mount throws away.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use branchfs_core::error::{Context, Error};
use branchfs_core::ids::LayerId;
use branchfs_core::layer::Layer;
use branchfs_core::no_follow;
use branchfs_core::object_copy::match_attributes;
use branchfs_core::overlay::Namespace;
use branchfs_core::overlayfs_mount::KernelMount;
use branchfs_core::overlayfs_upper::mount_over;
use branchfs_core::rooted_dir::{Tree, remove_path};
use branchfs_core::scheduling::{lower_priority, wait_for_reply, yield_now};

/// Most spares at a time.
const KEPT_MAX: usize = 8;

/// A layer in `directory`, and the kernel's file system over it.
#[derive(Debug)]
struct Spare {
    directory: PathBuf,
    mount: KernelMount,
}

impl Spare {
    fn make(base: &Path, directory: PathBuf) -> Result<Self, Error> {
        let below = Tree::open_root(base).at(base)?;
        let layer = Layer::absent(LayerId(0), &directory, Namespace::Trusted, false);
        let made = layer.make(&below).at(&directory);
        yield_now();
        match made.and_then(|()| mount_over(base, &directory, true)) {
            Ok(mount) => Ok(Self { directory, mount }),
            Err(error) => {
                let _ = remove_path(&directory); // the next mount does
                Err(error)
            }
        }
    }

    /// Becomes a layer that is forked now.
    fn become_layer(self, base: &Path, layer: &Path) -> Result<KernelMount, Error> {
        let root = Path::new("");
        let below = Tree::open_root(base).at(base)?;
        let stat = below.stat(root).at(base)?;
        let here = Tree::new(rustix::io::dup(self.mount.root()).at(layer)?);
        let renewed = self.mount.set_read_only(false).at(layer).and_then(|()| {
            match_attributes((&below, root, &stat), (&here, root)).at(layer) // it is written from here on
        });
        match renewed.and_then(|()| no_follow::rename(&self.directory, layer).at(layer)) {
            Ok(()) => Ok(self.mount),
            Err(error) => {
                self.discard();
                Err(error)
            }
        }
    }

    fn discard(self) {
        let _ = remove_path(&self.directory); // as above
    }
}

#[derive(Debug, Default)]
struct Pool {
    spares: VecDeque<Spare>,
    kept: usize,
    made: u64,
    /// A create has taken a spare since the last attempt to make one.
    wants_refill: bool,
    has_ended: bool,
}

#[derive(Debug)]
struct Shared {
    base: PathBuf,
    store: PathBuf,
    /// Leaf lock, held over no system call.
    pool: Mutex<Pool>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner) // no use of it leaves anything half-done
    }

    fn end(&self) {
        self.lock().has_ended = true;
        self.changed.notify_one();
    }

    /// Makes spares with `make` until the end.
    fn make_all(&self, make: impl Fn(&Path, PathBuf) -> Result<Spare, Error>) {
        let mut pool = self.lock();
        while !pool.has_ended {
            pool.wants_refill = false;
            if pool.spares.len() < pool.kept {
                pool.made += 1;
                let directory = self.store.join("layers").join(format!("spare-{}", pool.made));
                drop(pool);
                let made = make(&self.base, directory);
                yield_now();
                pool = self.lock();
                if let Ok(spare) = made {
                    pool.spares.push_back(spare);
                    continue;
                }
                // A full disk, say: the next create asks again, and tells.
            }
            // The end or a request may have come while the lock was released above.
            let is_idle = |pool: &mut Pool| !pool.has_ended && !pool.wants_refill;
            drop(self.changed.wait_while(pool, is_idle).unwrap_or_else(PoisonError::into_inner));
            wait_for_reply();
            pool = self.lock();
        }
    }
}

/// The spares of one mount, and the thread that makes them.
#[derive(Debug)]
pub(super) struct Spares {
    shared: Arc<Shared>,
    maker: Mutex<Option<JoinHandle<()>>>,
}

impl Spares {
    /// None yet.
    pub(super) fn new(base: &Path, store: &Path) -> Self {
        let (base, store) = (base.to_path_buf(), store.to_path_buf());
        let (pool, changed) = (Mutex::new(Pool { kept: 1, ..Pool::default() }), Condvar::new());
        let shared = Arc::new(Shared { base, store, pool, changed });
        Self { shared, maker: Mutex::default() }
    }

    /// Begins to make them.
    pub(super) fn begin(&self) {
        let shared = Arc::clone(&self.shared);
        let make = move || {
            lower_priority();
            shared.make_all(Spare::make);
        };
        // Without a thread there are none.
        let maker = thread::Builder::new().name("spares".to_owned()).spawn(make).ok();
        *self.maker.lock().unwrap_or_else(PoisonError::into_inner) = maker;
    }

    /// Makes a spare the layer in `layer`, if there is one that can be.
    pub(super) fn take(&self, layer: &Path) -> Option<KernelMount> {
        let spare = {
            let mut pool = self.shared.lock();
            pool.kept = (2 * pool.kept).min(KEPT_MAX);
            pool.spares.pop_front()
        };
        // What stands in the way of this one stands in the way of the one that is then made, and is told there.
        spare?.become_layer(&self.shared.base, layer).ok()
    }

    /// Lets what was taken be made again.
    pub(super) fn refill(&self) {
        self.shared.lock().wants_refill = true;
        self.shared.changed.notify_one();
    }

    /// Gives all of them back, and makes no more.
    pub(super) fn end(&self) {
        self.shared.end();
        let maker = self.maker.lock().unwrap_or_else(PoisonError::into_inner).take();
        let _ = maker.map(JoinHandle::join); // one that panicked makes no more either
        let spares = std::mem::take(&mut self.shared.lock().spares);
        spares.into_iter().for_each(Spare::discard);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// Returns the number of attempts until the maker ends. Each attempt calls `meanwhile` with its number and fails.
    fn attempts(meanwhile: impl Fn(&Spares, usize) + Send + Sync + 'static) -> usize {
        const WAIT_MAX: Duration = Duration::from_secs(30);
        let spares = Spares::new(Path::new("/"), Path::new("/"));
        let (sender, ended) = mpsc::channel();
        thread::spawn(move || {
            let attempts = AtomicUsize::new(0);
            spares.shared.make_all(|_, _| {
                meanwhile(&spares, attempts.fetch_add(1, Ordering::Relaxed));
                Err(Error::Unsupported("a failure".to_owned()))
            });
            sender.send(attempts.into_inner()).unwrap();
        });
        ended.recv_timeout(WAIT_MAX).expect("the maker ends")
    }

    #[test]
    fn an_end_during_an_attempt_that_fails_ends_the_maker() {
        assert_eq!(attempts(|spares, _| spares.shared.end()), 1);
    }

    #[test]
    fn a_refill_requested_during_an_attempt_that_fails_is_another_attempt() {
        let refill_then_end = |spares: &Spares, attempt| match attempt {
            0 => spares.refill(),
            _ => spares.shared.end(),
        };
        assert_eq!(attempts(refill_then_end), 2);
    }
}

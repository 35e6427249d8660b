//! Background work that no reply waits for: emptying the trash, and invalidating the kernel's cache of each node of a
//! large branch that is gone. One thread, started when it is first needed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;

use super::ctime_log::TrashCollector;
use crate::fail_stop::FailStop;
use crate::injected_panics::panic_if_listed;
use crate::mount::{Mount, MountedBranch};
use crate::rooted_dir::RootedDir;
use crate::scheduling::lower_priority;

/// A background job.
enum Job {
    /// Delete the content of these directories.
    Empty(Vec<PathBuf>, TrashCollector),
    /// Invalidate the kernel's cache of this branch, then close its files.
    Invalidate(Arc<Mount>, Arc<MountedBranch>),
}

impl Job {
    /// A panic stops transactions; the thread continues with the next job.
    fn run(self, fail_stop: &FailStop) {
        let job = || {
            panic_if_listed("background");
            self.work();
        };
        if catch_unwind(AssertUnwindSafe(job)).is_err() {
            fail_stop.trip("a background job panicked");
        }
    }

    fn work(self) {
        match self {
            Self::Empty(directories, unlinker) => {
                for tree in directories.iter().flat_map(|path| RootedDir::open_root(path)) {
                    for entry in tree.list(Path::new("")).unwrap_or_default() {
                        // What cannot be deleted is tried again the next time.
                        let _ = unlinker.remove(&tree, Path::new(&entry.name));
                    }
                }
            }
            Self::Invalidate(mount, mounted) => mount.invalidate_in_steps(&mounted),
        }
    }
}

/// Sends jobs to the thread, which ends when this is dropped.
pub(super) struct Background {
    fail_stop: Arc<FailStop>,
    sender: OnceLock<Option<mpsc::Sender<Job>>>,
}

impl Background {
    pub(super) fn new(fail_stop: Arc<FailStop>) -> Self {
        Self { fail_stop, sender: OnceLock::new() }
    }

    pub(super) fn empty(&self, directories: Vec<PathBuf>, unlinker: TrashCollector) {
        // Without a thread it is left for the next mount.
        let _ = self.send(Job::Empty(directories, unlinker));
    }

    pub(super) fn invalidate(&self, mount: &Arc<Mount>, mounted: Arc<MountedBranch>) {
        if let Err(job) = self.send(Job::Invalidate(Arc::clone(mount), mounted)) {
            job.run(&self.fail_stop); // the kernel must be notified
        }
    }

    fn send(&self, job: Job) -> Result<(), Box<Job>> {
        let sender = self.sender.get_or_init(|| {
            let (sender, jobs) = mpsc::channel::<Job>();
            let fail_stop = Arc::clone(&self.fail_stop);
            let run = move || {
                lower_priority();
                jobs.iter().for_each(|job| job.run(&fail_stop));
            };
            thread::Builder::new().name("background".to_owned()).spawn(run).ok().map(|_| sender)
        });
        match sender {
            Some(sender) => sender.send(job).map_err(|unsent| Box::new(unsent.0)),
            None => Err(Box::new(job)),
        }
    }
}

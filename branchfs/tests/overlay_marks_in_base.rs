//! Objects of a base that have a meaning in overlayfs: attributes in its namespaces, and devices 0:0. Neither driver loses
//! them without an error.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::fs;
use std::path::Path;

use common::{Mount, refusal, shell, succeed};

fn set_attribute(path: &Path, name: &str) {
    rustix::fs::lsetxattr(path, name, b"own", rustix::fs::XattrFlags::empty()).unwrap();
}

#[test]
fn attributes_of_other_overlays_in_the_base_are_kept_or_the_commit_is_refused() {
    for driver in ["fuse", "overlay"] {
        let mount = Mount::unmounted(|base| {
            shell(base, "mkdir d; echo base | tee file moved d/deep other untouched > /dev/null");
            for path in ["file", "moved", "d/deep"] {
                set_attribute(&base.join(path), "user.overlay.own");
            }
            set_attribute(&base.join("other"), "trusted.overlay.own");
        });
        succeed(&mount.run(&["mount", "--driver", driver, "--base"], &[&mount.base()]));
        let mut value = [0; 8];
        let branch = mount.create("keeps");
        shell(&branch, "echo more >> file; mv moved new; echo more >> d/deep; chmod 600 d/deep");
        for (place, when) in [(branch, "in the branch"), (mount.base(), "after the commit")] {
            if when == "after the commit" {
                mount.commit("keeps");
            }
            for path in ["file", "new", "d/deep"] {
                let found =
                    rustix::fs::lgetxattr(place.join(path), "user.overlay.own", &mut value[..]);
                assert_eq!(found, Ok(3), "{driver}: {path} {when}");
            }
        }
        shell(&mount.create("drops"), "echo more >> other; echo more >> untouched");
        for options in [&["commit", "drops"][..], &["commit", "--force", "drops"]] {
            let said = refusal(&mount.run(options, &[]));
            assert!(said.contains("other has the attribute trusted.overlay.own"), "{said}");
        }
        let read = |name: &str| fs::read_to_string(mount.base().join(name)).unwrap();
        assert_eq!((read("other"), read("untouched")), ("base\n".into(), "base\n".into()));
        succeed(&mount.run(&["commit", "--exclude", "/other", "drops"], &[]));
        assert_eq!(read("untouched"), "base\nmore\n");
        rustix::fs::lremovexattr(mount.base().join("other"), "trusted.overlay.own").unwrap();
    }
}

#[test]
fn a_device_that_the_overlay_driver_cannot_show_is_not_taken_away() {
    let mount =
        Mount::unmounted(|base| shell(base, "mkdir d; mknod null c 0 0; mknod d/null c 0 0"));
    succeed(&mount.run(&["mount", "--driver", "overlay", "--base"], &[&mount.base()]));
    for (change, path) in [("echo new > null", "null"), ("rmdir d", "d/null")] {
        let name = path.replace('/', "-");
        shell(&mount.create(&name), change);
        let said = refusal(&mount.run(&["commit", "--force", &name], &[]));
        assert!(said.contains(&format!("{path} is a device 0:0 in the base")), "{said}");
        mount.abort(&name);
    }
    shell(&mount.base(), "test -c null; test -c d/null");
    // The FUSE driver shows them, and carries out what is done to them.
    mount.unmount();
    succeed(&mount.run(&["mount", "--driver", "fuse", "--base"], &[&mount.base()]));
    shell(&mount.create("deletes"), "test -c null; test -c d/null; rm -r d");
    mount.commit("deletes");
    shell(&mount.base(), "test -c null; test ! -e d");
}

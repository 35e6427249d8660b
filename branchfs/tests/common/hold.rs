//! Holds the daemon where it opens a directory: it waits for who asked the kernel to be asked before (fanotify).

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::Mount;

/// `PID DIRECTORY [NAME]`: the first time that the process opens the directory, or a file of that name on the same mount, it
/// waits until a line is read. `again` in it: so it does the next time.
const HOLDING: &str = r#"
import ctypes, os, select, struct, sys
pid, path, name = int(sys.argv[1]), sys.argv[2], ''.join(sys.argv[3:])
libc = ctypes.CDLL(None, use_errno=True)
libc.fanotify_mark.argtypes = ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p
CLASS_CONTENT, CLOSE_ON_EXEC, ADD, HERE, OPEN_PERMISSION, ON_DIRECTORIES, ALLOW = 4, 1, 1, -100, 0x10000, 0x40000000, 1
events = libc.fanotify_init(CLASS_CONTENT | CLOSE_ON_EXEC, os.O_RDONLY | os.O_CLOEXEC)
assert events >= 0, os.strerror(ctypes.get_errno())
MOUNT = 0x10 if name else 0
marked = libc.fanotify_mark(events, ADD | MOUNT, OPEN_PERMISSION | ON_DIRECTORIES, HERE, os.fsencode(path))
assert marked == 0, os.strerror(ctypes.get_errno())
print('ready', flush=True)
held = None
allow = lambda fd: (os.write(events, struct.pack('=iI', fd, ALLOW)), os.close(fd))
while True:
    if 0 in select.select([events, 0], [], [])[0]:
        line = os.read(0, 100)
        if not line:
            break
        released, held = held, None if line == b'again\n' else held
        allow(released)
        continue
    found = os.read(events, 4096)
    while found:
        length, *_, fd, who = struct.unpack_from('=IBBHQii', found)
        found = found[length:]
        is_meant = not name or os.readlink(f'/proc/self/fd/{fd}').endswith('/' + name)
        if who == pid and held is None and is_meant:
            held = fd
            print('held', flush=True)
        else:
            allow(fd)
"#;

/// Holds the daemon at the next time that it opens a directory; lets go of it at the end.
pub struct Hold {
    holder: Child,
    said: BufReader<std::process::ChildStdout>,
}

impl Hold {
    pub fn new(mount: &Mount, directory: &Path) -> Self {
        Self::with(mount, &[directory])
    }

    /// At the next time that it opens a file of this name. The base must be on a mount of its own: all that open something
    /// there wait for a moment.
    pub fn at_file(mount: &Mount, name: &str) -> Self {
        Self::with(mount, &[&mount.base(), Path::new(name)])
    }

    fn with(mount: &Mount, what: &[&Path]) -> Self {
        let script = mount.directory.path().join("holding.py");
        fs::write(&script, HOLDING).unwrap();
        let mut command = Command::new("python3");
        command.arg(script).arg(mount.daemon().to_string()).args(what);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut holder = command.spawn().unwrap();
        let said = BufReader::new(holder.stdout.take().unwrap());
        let mut hold = Self { holder, said };
        hold.hear("ready");
        hold
    }

    pub fn hear(&mut self, word: &str) {
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), word);
    }

    pub fn release(&mut self) {
        self.say("\n");
    }

    /// Lets go of it until the next time.
    pub fn release_once(&mut self) {
        self.say("again\n");
    }

    fn say(&mut self, line: &str) {
        self.holder.stdin.as_mut().unwrap().write_all(line.as_bytes()).unwrap();
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

"""States of programs that a session carries over to its children, warns of, or refuses to fork.

`failures` tries them in a workspace. An ordinary user calls it in a program of its own:

    python -m support.session_states DIRECTORY DRIVER
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path

from branching import BranchingError, Child, MemoryBranchError, Session, Workspace

SURVIVING: dict[str, dict[str, tuple[str, ...]]] = {
    # What the session runs, each child of two forks, the session after the pick, and after a commit.
    "files": {
        "modes": (
            "import os\nf = open('m1', 'w+'); f.write('abc'); u = open('m2', 'w', encoding='utf-16'); u.write('é')\n"
            "r = open('m3', 'wb', buffering=0); r.write(b'1'); x = open('m5', 'x'); x.write('x')\n"
            "s = os.open('m4', os.O_WRONLY | os.O_CREAT | os.O_SYNC); os.dup2(s, 200)\n"
            "h = open('m6', 'wb'); h.seek(5 << 30); h.write(b'e')",
            "f.write('d'); u.write('ü'); r.write(b'2'); os.write(200, b'z'); h.write(b'f')",
            "import fcntl\nf.seek(0); assert f.read() == 'abcd'; u.close(); x.close(); h.close()\n"
            "assert open('m2', encoding='utf-16').read() == 'éü'; assert open('m3').read() == '12'\n"
            "assert fcntl.fcntl(200, fcntl.F_GETFL) & os.O_SYNC; assert os.lseek(s, 0, 1) == 1\n"
            "assert os.stat('m6').st_size == (5 << 30) + 2; os.remove('m6')",
        ),
        "many files": (
            "fs = [open(f'many{i}', 'w') for i in range(300)]\nfor i, f in enumerate(fs): f.write(str(i))",
            "for f in fs: f.write('c')",
            "for f in fs: f.close()\nfor i in range(300): assert open(f'many{i}').read() == f'{i}c'",
        ),
        "strange names": (
            "names = (b'\\xff\\xfe', 'new\\nline', 'x (deleted)', 'back\\\\slash \\t', 'ünï')\n"
            "fs = [open(name, 'w') for name in names]",
            "for f in fs: f.write('c'); f.flush()",
            "for name in names: assert open(name).read() == 'c'",
        ),
        "links": (
            "import os\nf = open('t1', 'w'); os.symlink('t1', 'sl'); s = open('sl', 'a')\n"
            "os.link('t1', 'hl'); h = open('hl', 'a')\n"
            "g = open('t2', 'w'); os.link('t2', 'hl2'); os.remove('hl2')",
            "s.write('s'); s.flush(); h.write('h'); h.flush(); g.write('g')",
            "g.close(); assert (open('t1').read(), open('t2').read()) == ('sh', 'g')",
        ),
        "renamed files and directories": (
            "import os\nf = open('seed.txt', 'a'); f.write('1'); os.rename('seed.txt', 'seed2')\n"
            "os.mkdir('rd'); g = open('rd/f', 'w'); os.rename('rd', 'rd2')",
            "f.write('2'); g.write('g')",
            "f.close(); g.close(); assert open('seed2').read() == 'seed\\n12'; assert open('rd2/f').read() == 'g'",
        ),
        "directory handles": (
            "import os; os.mkdir('dh'); d = os.open('dh', os.O_RDONLY | os.O_DIRECTORY); p = os.open('dh', os.O_PATH)\n"
            "f = os.open('through', os.O_RDWR | os.O_CREAT, dir_fd=d); os.write(f, b'one'); os.set_inheritable(p, True)",
            "os.close(os.open('x', os.O_CREAT | os.O_WRONLY, dir_fd=d)); os.write(f, b'two')",
            "assert sorted(os.listdir(d)) == ['through', 'x']; os.lseek(d, 0, 0); assert os.pread(f, 9, 0) == b'onetwo'\n"
            "assert os.stat('x', dir_fd=p).st_size == 0; assert os.get_inheritable(p)",
            "os.close(os.open('y', os.O_CREAT | os.O_WRONLY, dir_fd=p)); assert os.path.exists('dh/y')",
        ),
        "a listing that was read to its end": (
            "import os; os.mkdir('dl'); open('dl/a', 'w').close(); s = os.scandir('dl'); names = [e.name for e in s]",
            "",
            "assert names == ['a']",
        ),
        "a file outside that is only read": (
            "raw = open('/etc/passwd', 'rb', buffering=0); raw.read(7); text = open('/etc/passwd'); text.readline()",
            "assert raw.read(5) == open('/etc/passwd', 'rb').read()[7:12]; raw.read(); text.read()",
            "assert raw.read() == b'' == text.read().encode()",
        ),
        "temporary files in the workspace": (
            "import os, tempfile; s = tempfile.SpooledTemporaryFile(); s.write(b'1')\n"
            "d = tempfile.TemporaryDirectory(dir='.'); n = tempfile.NamedTemporaryFile('w+', dir=d.name); n.write('1')",
            "s.write(b'2'); n.write('2')",
            "s.seek(0); assert s.read() == b'12'; n.seek(0); assert n.read() == '12'; n.close(); assert not os.path.exists(n.name)\n"
            "d.cleanup(); assert not os.path.exists(d.name)",
        ),
        "a module of the workspace": (
            "import importlib, os, sys; sys.path.insert(0, os.getcwd()); open('mine.py', 'w').write('value = 1\\n'); import mine",
            "open('mine.py', 'w').write('value = 22\\n')",
            "importlib.invalidate_caches(); assert importlib.reload(mine).value == 22",
        ),
    },
    "archives, databases and logs": {
        "a zip archive": (
            "import zipfile; z = zipfile.ZipFile('a.zip', 'w'); z.writestr('one', '1')",
            "z.writestr('two', '2')",
            "z.writestr('three', '3'); z.close(); read = zipfile.ZipFile('a.zip')\n"
            "assert (read.namelist(), read.testzip()) == (['one', 'two', 'three'], None)",
        ),
        "a member of a zip archive that is half read": (
            "import zipfile\nwith zipfile.ZipFile('c.zip', 'w') as q: q.writestr('one', 'abcdef' * 1000)\n"
            "m = zipfile.ZipFile('c.zip').open('one'); m.read(3)",
            "assert m.read(3) == b'def'",
            "assert m.read(3) == b'abc'",
        ),
        **{
            f"{name} files": (
                f"import {name} as c; w = c.open('w.{name}', 'wb'); w.write(b'one ')\n"
                f"with c.open('r.{name}', 'wb') as q: q.write(b'abcdef' * 100000)\nr = c.open('r.{name}'); r.read(300001)",
                "w.write(b'two '); assert r.read(2) == b'bc'",
                f"w.write(b'three'); w.close(); assert c.open('w.{name}').read() == b'one two three'; assert len(r.read()) == 299997",
            )
            for name in ("gzip", "bz2", "lzma")
        },
        "a tar archive": (
            "import io, tarfile; t = tarfile.open('a.tgz', 'w:gz')\n"
            "def put(n): i = tarfile.TarInfo(n); i.size = 3; t.addfile(i, io.BytesIO(b'abc'))\nput('x')",
            "put('y')",
            "put('z'); t.close(); assert tarfile.open('a.tgz').getnames() == ['x', 'y', 'z']",
        ),
        "tables, pickles and shelves": (
            "import csv, dbm.dumb, pickle, shelve; f = open('a.csv', 'w', newline=''); w = csv.writer(f); w.writerow([1])\n"
            "h = open('p', 'wb'); p = pickle.Pickler(h); p.dump(1); s = shelve.Shelf(dbm.dumb.open('sh')); s['a'] = 1",
            "w.writerow([2]); p.dump(2); s['b'] = 2",
            "f.close(); h.close(); s.close(); h = open('p', 'rb'); assert open('a.csv').read().split() == ['1', '2']\n"
            "assert (pickle.load(h), pickle.load(h)) == (1, 2); assert dict(shelve.Shelf(dbm.dumb.open('sh'))) == {'a': 1, 'b': 2}",
        ),
        "databases": (
            "import sqlite3; db = sqlite3.connect('sq.db'); mem = sqlite3.connect(':memory:')\n"
            "for c in (db, mem): c.execute('create table t (x)'); c.execute('insert into t values (1)'); c.commit()",
            "for c in (db, mem): c.execute('insert into t values (2)'); c.commit()",
            "for c in (db, mem): assert c.execute('select x from t').fetchall() == [(1,), (2,)]\n"
            "db.execute('insert into t values (3)'); db.commit()",
            "assert len(db.execute('select x from t').fetchall()) == 3",
        ),
        "handlers of logging": (
            "import logging, logging.handlers as h; log = logging.getLogger('odd'); log.setLevel(10); log.propagate = False\n"
            "for k in (logging.FileHandler('l1'), h.WatchedFileHandler('l2'), h.TimedRotatingFileHandler('l3'),\n"
            "          h.RotatingFileHandler('l4', maxBytes=4, backupCount=5), h.MemoryHandler(100)): log.addHandler(k)\n"
            "log.info('a')",
            "log.info('b')",
            "log.info('c'); assert {open(f'l{n}').read() for n in (1, 2, 3)} == {'a\\nb\\nc\\n'}\n"
            "assert (open('l4').read(), open('l4.1').read()) == ('c\\n', 'b\\n') or open('l4').read() == 'c\\n'",
            "log.info('d'); assert {open(f'l{n}').read() for n in (1, 2, 3)} == {'a\\nb\\nc\\nd\\n'}",
        ),
    },
    "mappings": {
        "pages that were not touched": (
            "import mmap\nwith open('big', 'wb') as q: q.write(bytes(range(256)) * 40000)\n"
            "f = open('big', 'rb'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)",
            "assert m[3_000_001] == 3_000_001 % 256",
            "assert m[6_000_001] == 6_000_001 % 256",
            "assert all(m[i] == i % 256 for i in range(0, len(m), 4096))",
        ),
        "changed pages of a file that is open for writing": (
            "import mmap\nwith open('big2', 'wb') as q: q.write(b'a' * 100000)\n"
            "f = open('big2', 'r+b'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY); f.close(); m[0] = 66",
            "m[1] = 67",
            "assert m[:3] == b'BCa'",
            "assert m[:3] == b'BCa'; assert m[99_999] == 97",
        ),
        "a file that is made and mapped in a child": (
            "import mmap",
            "with open('new', 'wb') as q: q.write(b'n' * 5_000_000)\n"
            "f = open('new', 'rb'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ); f.close()",
            "assert m[2_000_001] == ord('n')",
            "assert m[:] == b'n' * 5_000_000",
        ),
        "a library that a child deletes": (
            "import ctypes, ctypes.util, os, re, shutil\n"
            "used = re.search(r'/\\S*/libm[.-]\\S*', open('/proc/self/maps').read())\n"
            "shutil.copy(used[0] if used else ctypes.util.find_library('m'), 'gone.so'); lib = ctypes.CDLL(os.path.abspath('gone.so'))\n"
            "for n in ('sin', 'exp', 'log'): f = getattr(lib, n); f.restype = ctypes.c_double; f.argtypes = [ctypes.c_double]",
            "os.remove('gone.so'); assert lib.sin(0) == 0",
            "assert lib.exp(0) == 1",
            "assert lib.log(1) == 0",
        ),
        "a library of the workspace": (
            "import ctypes, ctypes.util, os, re, shutil\n"
            "used = re.search(r'/\\S*/libm[.-]\\S*', open('/proc/self/maps').read())\n"
            "shutil.copy(used[0] if used else ctypes.util.find_library('m'), 'm.so'); lib = ctypes.CDLL(os.path.abspath('m.so'))\n"
            "for n in ('cos', 'tan', 'cbrt'): f = getattr(lib, n); f.restype = ctypes.c_double; f.argtypes = [ctypes.c_double]",
            "assert lib.cos(0) == 1",
            "assert lib.tan(0) == 0",
            "assert round(lib.cbrt(27)) == 3",
        ),
        "arrays": (
            "import numpy as np; a = np.random.default_rng(1).random((300, 300)); b = a @ a; np.save('arr.npy', a)\n"
            "r = np.load('arr.npy', mmap_mode='r'); c = np.load('arr.npy', mmap_mode='c')",
            "d = a @ b; np.linalg.svd(a); c[0, 0] = 5",
            "assert np.allclose(d, a @ a @ a); assert (r == a).all(); assert c[0, 0] == 5",
            "assert (r == a).all(); assert (c[1:] == a[1:]).all()",
        ),
    },
    "memory": {
        "locks": (
            "import queue, threading as t; l = t.Lock(); l.acquire(); r = t.RLock(); r.acquire(); c = t.Condition(); c.acquire()\n"
            "s = t.Semaphore(2); s.acquire(); e = t.Event(); e.set(); q = queue.Queue(); q.put(1); own = t.local(); own.x = 4",
            "assert l.locked(); r.acquire(); q.put(2); assert e.is_set()",
            "l.release(); r.release(); r.release(); c.notify(); c.release(); s.release(); assert (q.get(), q.get(), own.x) == (1, 2, 4)\n"
            "assert t.current_thread() is t.main_thread()",
        ),
        "handlers and masks of signals": (
            "import os, signal; got = []; signal.signal(signal.SIGUSR1, lambda *a: got.append(1)); signal.signal(signal.SIGWINCH, signal.SIG_IGN)\n"
            "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])",
            "os.kill(os.getpid(), signal.SIGUSR1); assert got == [1]",
            "os.kill(os.getpid(), signal.SIGUSR1); assert got == [1, 1]; assert signal.getsignal(signal.SIGWINCH) == signal.SIG_IGN\n"
            "assert signal.SIGUSR2 in signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])",
        ),
        "weak references": (
            "import gc, weakref\nclass K: pass\nk = K(); w = weakref.ref(k); d = weakref.WeakValueDictionary(a=k); gone = []\n"
            "weakref.finalize(k, gone.append, 1)",
            "assert w() is k is d['a']",
            "del k; gc.collect(); assert (w(), len(d), gone) == (None, 0, [1])",
        ),
        "an exit function": (
            "import atexit, os; atexit.register(lambda p=os.path.abspath('exits'): open(p, 'a').write('x'))",
        ),
        "random numbers": (
            "import random; r = random.Random(7); random.seed(3)",
            "x = r.random(); random.random()",
            "assert x == random.Random(7).random()",
        ),
        "attributes of the process": (
            "import os, resource; os.umask(0o27); os.nice(1); n = os.nice(0); resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
            "os.environ['ODD'] = '1'; cpus = os.sched_getaffinity(0)",
            "open('um', 'w').close()",
            "assert os.stat('um').st_mode & 0o777 == 0o640; os.umask(0o22); assert (os.nice(0), os.sched_getaffinity(0)) == (n, cpus)\n"
            "assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0); assert os.getenv('ODD') == '1'",
        ),
        "generators, coroutines and context variables": (
            "import asyncio, contextvars\nv = contextvars.ContextVar('v'); v.set(1)\n"
            "def gen():\n    with open('gen', 'w') as f:\n        while True: f.write((yield) + ' '); f.flush()\n"
            "g = gen(); next(g); g.send('a')\nasync def one(): return 1\nasyncio.run(one()); c = one()",
            "g.send('b'); assert asyncio.run(one()) == 1",
            "g.send('c'); assert open('gen').read() == 'a b c '; assert (asyncio.run(c), v.get()) == (1, 1)",
        ),
        "objects of libraries in C": (
            "import decimal, hashlib, xml.parsers.expat as e, zlib\nh = hashlib.sha256(b'a'); z = zlib.compressobj(); zz = z.compress(b'a')\n"
            "n = []; p = e.ParserCreate(); p.StartElementHandler = lambda a, b: n.append(a); p.Parse('<a>'); decimal.getcontext().prec = 50",
            "h.update(b'b'); zz += z.compress(b'b'); p.Parse('<b/>')",
            "assert h.digest() == hashlib.sha256(b'ab').digest(); assert zlib.decompress(zz + z.flush()) == b'ab'\n"
            "assert (n, decimal.getcontext().prec) == (['a', 'b'], 50)",
        ),
        "data frames and models": (
            "import numpy as np, pandas as pd\nfrom sklearn.ensemble import RandomForestClassifier\nfrom sklearn.linear_model import LogisticRegression\n"
            "frame = pd.DataFrame({'x': range(1000), 'g': [i % 7 for i in range(1000)]})\n"
            "x = np.arange(400.).reshape(200, 2); y = (x[:, 0] > 200).astype(int); m = LogisticRegression().fit(x, y); rf = RandomForestClassifier(5).fit(x, y)",
            "s = frame.groupby('g').x.sum(); m2 = LogisticRegression(C=2).fit(x, y); rf.set_params(n_jobs=2).fit(x, y)",
            "frame.to_csv('frame.csv'); assert (int(s.sum()), len(pd.read_csv('frame.csv'))) == (499500, 1000)\n"
            "assert min(model.score(x, y) for model in (m, m2, rf)) > 0.9; LogisticRegression().fit(x, y)",
        ),
        "an IPython shell": (
            "from traitlets.config import Config\nfrom IPython.core.interactiveshell import InteractiveShell\n"
            "config = Config(); config.HistoryManager.enabled = False; shell = InteractiveShell(config=config); shell.run_cell('x = 41', store_history=True)",
            "shell.run_cell('x += 1; x', store_history=True)",
            "assert (shell.user_ns['x'], shell.user_ns['_'], shell.user_ns['In'][1]) == (42, 42, 'x = 41'); assert shell.run_cell('%pwd').success",
        ),
    },
    "programs and threads that have ended": {
        "programs": (
            "import os, subprocess; q = subprocess.Popen(['sh', '-c', 'exit 4']); os.waitid(os.P_PID, q.pid, os.WEXITED | os.WNOWAIT)",
            "assert q.poll() == 4",
            "assert (q.wait(), q.returncode) == (4, 4)",
        ),
        "processes of multiprocessing": (
            "import multiprocessing as m, os; c = m.get_context('fork'); p = c.Process(target=int); p.start(); p.join()\n"
            "q = c.Process(target=int); q.start(); os.waitid(os.P_PID, q.pid, os.WEXITED | os.WNOWAIT)\n"
            "with c.Pool(2) as pool: found = pool.map(abs, [-1, -2])\npool.join(); del pool",
            "assert (p.exitcode, q.exitcode, found) == (0, 0, [1, 2])",
            "q.join(); p.join(); assert (p.is_alive(), q.exitcode, m.active_children()) == (False, 0, [])",
        ),
        "threads": (
            "import threading; from concurrent.futures import ThreadPoolExecutor\nt = threading.Thread(target=int); t.start(); t.join()\n"
            "with ThreadPoolExecutor(2) as p: f = p.submit(pow, 2, 3)",
            "assert (f.result(), t.is_alive()) == (8, False)",
            "t.join(); t = threading.Thread(target=int); t.start(); t.join()",
        ),
    },
    "output to a variable": {
        "sys.stdout": (
            "import io, sys; old = sys.stdout; sys.stdout = text = io.StringIO(); print('a')",
            "print('b')",
            "print('c'); sys.stdout = old; assert text.getvalue() == 'a\\nb\\nc\\n'",
        ),
    },
    "output to a file": {
        "descriptor 1": (
            "import os; saved = os.dup(1); f = os.open('out', os.O_CREAT | os.O_RDWR | os.O_APPEND); os.dup2(f, 1); os.system('echo a')",
            "os.system('echo b')",
            "os.system('echo c'); os.dup2(saved, 1); assert open('out').read() == 'a\\nb\\nc\\n'; os.system('echo SEEN')",
        ),
    },
    "output to nothing": {
        "descriptor 2": (
            "import os; saved = os.dup(2); os.dup2(os.open('/dev/null', os.O_RDWR), 2)",
            "assert os.readlink('/proc/self/fd/2') == '/dev/null'",
            "assert os.readlink('/proc/self/fd/2') == '/dev/null'; os.dup2(saved, 2); os.system('echo SEEN >&2')",
        ),
    },
    "a duplicate of standard output": {
        "descriptor": (
            "import os; out = open(os.dup(1), 'w')",
            "out.write('SEEN\\n'); out.flush()",
            "out.write('SEEN\\n'); out.flush()",
        ),
    },
}
WRITES = "open for writing outside of the workspace"
SHARED = "shared writable memory"
PROCESS = "a running child process"
REFUSED: dict[str, tuple[str, str, str]] = {
    # What the session runs, the message, and what makes a fork possible again.
    "an alarm": (
        "import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN); signal.alarm(1000)",
        "a running timer",
        "signal.alarm(0)",
    ),
    "a timer of the kernel": (
        "import ctypes, signal, struct; c = ctypes.CDLL(None); signal.signal(signal.SIGALRM, signal.SIG_IGN); t = ctypes.c_void_p()\n"
        "c.timer_create(1, None, ctypes.byref(t)); c.timer_settime(t, 0, struct.pack('4q', 0, 0, 1000, 0), None)",
        "a running timer",
        "c.timer_delete(t)",
    ),
    "a blocked signal that has arrived": (
        "import os, signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]); signal.signal(signal.SIGUSR2, lambda *_: None)\n"
        "os.kill(os.getpid(), signal.SIGUSR2)",
        "blocked signals, which a fork loses: SIGUSR2",
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])",
    ),
    "a timer of threading": (
        "import threading; t = threading.Timer(1000, int); t.start()",
        "running threads.*",
        "t.cancel(); t.join()",
    ),
    "a pool of threads": (
        "from concurrent.futures import ThreadPoolExecutor; p = ThreadPoolExecutor(1); p.submit(int).result()",
        "running threads.*ThreadPoolExecutor",
        "p.shutdown()",
    ),
    "another interpreter": (
        "import sys\ntry: import _interpreters as n\nexcept ImportError: import _xxsubinterpreters as n\ni = n.create()",
        "other interpreters in this process",
        "n.destroy(i)",
    ),
    "a program with pipes": (
        "import subprocess as s; p = s.Popen(['cat'], stdin=s.PIPE, stdout=s.PIPE)",
        f"{PROCESS}: cat",
        "p.communicate(b'')",
    ),
    "a forked process": (
        "import os, time\np = os.fork()\nif p == 0:\n    time.sleep(1000); os._exit(0)",
        PROCESS,
        "os.kill(p, 9); os.waitpid(p, 0)",
    ),
    "a process of multiprocessing": (
        "import multiprocessing as m, time; p = m.get_context('fork').Process(target=time.sleep, args=(1000,)); p.start()",
        PROCESS,
        "p.kill(); p.join()",
    ),
    "a pool of processes": (
        "import multiprocessing as m; from concurrent.futures import ProcessPoolExecutor as P\n"
        "p = P(1, mp_context=m.get_context('fork')); p.submit(int).result()",
        f"running threads|{PROCESS}",
        "p.shutdown(); del p",
    ),
    "a manager": (
        "import multiprocessing as m; p = m.get_context('fork').Manager()",
        PROCESS,
        "p.shutdown()",
    ),
    "a lock of multiprocessing": (
        "import multiprocessing as m; x = m.get_context('fork').Lock()",
        SHARED,
        "del x",
    ),
    "a queue of multiprocessing": (
        "import multiprocessing as m; x = m.get_context('fork').SimpleQueue()",
        SHARED,
        "del x",
    ),
    "shared anonymous memory": ("import mmap; m = mmap.mmap(-1, 4096)", SHARED, "m.close()"),
    "a shared array in a file": (
        "import numpy as np; m = np.memmap('mm', mode='w+', shape=100)",
        f"{SHARED}: .*mm",
        "del m",
    ),
    "shared memory of System V": (
        "import ctypes; c = ctypes.CDLL(None); i = c.shmget(0, 4096, 0o1600); c.shmat.restype = ctypes.c_void_p; p = c.shmat(i, None, 0)",
        SHARED,
        "c.shmdt(ctypes.c_void_p(p)); c.shmctl(i, 0, None)",
    ),
    "a temporary file": ("import tempfile; t = tempfile.TemporaryFile()", WRITES, "t.close()"),
    "a named temporary file": (
        "import tempfile; t = tempfile.NamedTemporaryFile()",
        WRITES,
        "t.close()",
    ),
    "a file in memory": ("import os; f = os.memfd_create('x')", WRITES, "os.close(f)"),
    "a log outside": (
        "import logging; h = logging.FileHandler('/tmp/log'); h.emit(logging.LogRecord('n', 20, 'p', 1, 'm', (), None))",
        f"{WRITES}: /tmp/log",
        "h.close()",
    ),
    "a database outside": (
        "import sqlite3; db = sqlite3.connect('/tmp/r.db'); db.execute('create table if not exists t (x)'); db.commit()",
        f"{WRITES}: /tmp/r.db",
        "db.close()",
    ),
    "a deleted file": ("import os; f = open('gone', 'w'); os.remove('gone')", "gone", "f.close()"),
    "a replaced file": (
        "import os; f = open('repl', 'w'); open('repl2', 'w').close(); os.rename('repl2', 'repl')",
        "repl",
        "f.close()",
    ),
    "a file of which one link was removed": (
        "import os; f = open('hk', 'w'); os.link('hk', 'hk2'); os.remove('hk')",
        "an open file of the workspace that cannot be opened again: .*hk",
        "f.close()",
    ),
    "a deleted directory": (
        "import os, shutil; os.mkdir('rmd'); d = os.open('rmd', os.O_RDONLY); shutil.rmtree('rmd')",
        "rmd",
        "os.close(d)",
    ),
    "a deleted working directory": (
        "import os; old = os.getcwd(); os.mkdir('wd'); os.chdir('wd'); os.rmdir('../wd')",
        "a working directory that was deleted: .*wd",
        "os.chdir(old)",
    ),
    "a named pipe": (
        "import os; os.mkfifo('ff'); f = os.open('ff', os.O_RDWR)",
        "special file.*ff",
        "os.close(f)",
    ),
    "a listing of the workspace": (
        "import os; [open(f'l{i}', 'w').close() for i in range(3)]; s = os.scandir('.'); next(s)",
        "a listing of .* that was not read to its end",
        "s.close()",
    ),
    "a listing outside": (
        "import os; s = os.scandir('/etc'); next(s)",
        "a listing of /etc",
        "s.close()",
    ),
    "a lock on a file": (
        "import fcntl; f = open('fl', 'w'); fcntl.flock(f, fcntl.LOCK_EX)",
        "a lock on .*fl",
        "f.close()",
    ),
    "a lock on a part of a file": (
        "import fcntl; f = open('fl2', 'w'); fcntl.lockf(f, fcntl.LOCK_EX, 10)",
        "a lock on .*fl2",
        "f.close()",
    ),
    "a lock on a directory": (
        "import fcntl, os; f = os.open('.', os.O_RDONLY); fcntl.flock(f, fcntl.LOCK_EX)",
        "a lock on ",
        "os.close(f)",
    ),
    "a lock on a directory outside": (
        "import fcntl, os; f = os.open('/tmp', os.O_RDONLY); fcntl.flock(f, fcntl.LOCK_SH)",
        "a lock on /tmp",
        "os.close(f)",
    ),
    "a transaction": (
        "import sqlite3; db = sqlite3.connect('r.db'); db.execute('create table t (x)'); db.execute('insert into t values (1)')",
        "a lock on .*r.db",
        "db.commit()",
    ),
    "rows that were not fetched": (
        "import sqlite3; db = sqlite3.connect('r2.db'); db.execute('create table t (x)')\n"
        "db.executemany('insert into t values (?)', [(i,) for i in range(9)]); db.commit(); c = db.execute('select x from t'); c.fetchone()",
        "a lock on .*r2.db",
        "c.close(); db.close()",
    ),
    "a database in WAL mode": (
        "import sqlite3; db = sqlite3.connect('r3.db'); db.execute('pragma journal_mode=wal'); db.execute('create table t (x)'); db.commit()",
        f"{SHARED}: .*r3.db-shm",
        "db.close()",
    ),
    "a watch on the workspace": (
        "import ctypes, os; c = ctypes.CDLL(None); i = c.inotify_init(); c.inotify_add_watch(i, os.fsencode(os.getcwd()), 0xfff)",
        "a watch on files of the workspace",
        "os.close(i)",
    ),
}
NAMED: dict[str, tuple[str, str, str]] = {
    # What the session runs, the warning, and what ends it.
    "a socket": ("import socket; s = socket.socket()", "socket:.* is shared by all", "s.close()"),
    "a socket in the workspace": (
        "import os, socket; s = socket.socket(socket.AF_UNIX); s.bind('sock'); s.listen()",
        "socket:",
        "s.close(); os.remove('sock')",
    ),
    "a pipe": (
        "import os; r, w = os.pipe()",
        "pipe:.* is shared by all",
        "os.close(r); os.close(w)",
    ),
    "the output of a program that has ended": (
        "import subprocess as s; p = s.Popen(['echo', 'x'], stdout=s.PIPE); p.wait()",
        "pipe:",
        "assert p.stdout.read() == b'x\\n'; p.stdout.close()",
    ),
    "a named pipe outside": (
        "import os; os.mkfifo('/tmp/ff'); f = os.open('/tmp/ff', os.O_RDWR)",
        "/tmp/ff.* is shared by all",
        "os.close(f)",
    ),
    "a terminal": (
        "import os; a, b = os.openpty()",
        "/dev/pts/.* is shared by all",
        "os.close(a); os.close(b)",
    ),
    "an event loop": (
        "import asyncio; loop = asyncio.new_event_loop()",
        "eventpoll",
        "loop.close()",
    ),
    "an event counter": (
        "import ctypes, os; f = ctypes.CDLL(None).eventfd(0, 0)",
        "eventfd",
        "os.close(f)",
    ),
    "a watch outside": (
        "import ctypes, os; c = ctypes.CDLL(None); i = c.inotify_init(); c.inotify_add_watch(i, b'/tmp', 0xfff)",
        "inotify.* is shared by all",
        "os.close(i)",
    ),
    "a forked process that has ended": (
        "import os\np = os.fork()\nif p == 0: os._exit(5)\nos.waitid(os.P_PID, p, os.WEXITED | os.WNOWAIT)",
        "process .* has ended: a forked child cannot wait for it",
        "assert os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) == 5",
    ),
}


class _Trial:
    """A session in which states are tried; each has variables of its own."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.failures: dict[str, str] = {}
        session.run("states = {}").result()

    def run(self, name: str, code: str, where: Session | Child | None = None) -> None:
        own = f"states.setdefault({name!r}, {{}})"
        cell = (where or self.session).run(f"exec({code!r}, {own})", timeout=120)
        if cell.exception is not None:
            self.failures.setdefault(name, f"{cell.exception!r} in {code}")
        elif "SEEN" in code and "SEEN" not in cell.stdout + cell.stderr:
            self.failures.setdefault(name, f"nothing was printed by {code}")


def surviving(workspace: Workspace | str, group: str) -> dict[str, str]:
    """Tries states that children have, the session after a pick, and after a commit."""
    states = SURVIVING[group]
    with warnings.catch_warnings(), Session(workspace) as session:
        warnings.simplefilter("ignore")
        trial = _Trial(session)

        def step(number: int, where: Session | Child | None = None) -> None:
            for name, codes in states.items():
                if len(codes) > number:
                    trial.run(name, codes[number], where)

        step(0)
        for is_picked in (False, True):
            children = session.fork(2)
            for child in children:
                step(1, child)
            if is_picked:
                session.pick(children[1])
            else:
                session.none()
        step(2)
        session.commit()
        step(3)
    return trial.failures


def refused(workspace: Workspace | str) -> dict[str, str]:
    """Tries states of which a fork must warn, or which it must refuse, in one session."""
    with Session(workspace) as session:
        trial = _Trial(session)
        for name, (code, message, undo) in {**REFUSED, **NAMED}.items():
            trial.run(name, code)
            if not re.search(message, found := _outcome(session, is_refused=name in REFUSED)):
                trial.failures.setdefault(name, f"{found} instead of {message}")
            trial.run(name, undo)
            session.run(f"states.pop({name!r}, None); import gc; gc.collect()").result()
            if "refused" in (found := _outcome(session, is_refused=False)):
                trial.failures.setdefault(name, f"afterwards: {found}")
        session.abort()
    return trial.failures


def _outcome(session: Session, *, is_refused: bool) -> str:
    """Forks; returns the message of the refusal, or the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            session.fork(1)
        except MemoryBranchError as error:
            return error.message if is_refused else f"refused: {error.message}"
        except BranchingError as error:
            return f"{error!r}"
    session.none()
    return "it forked" if is_refused else "; ".join(str(each.message) for each in caught)


def failures(workspace: Workspace | str, name: str) -> dict[str, str]:
    """Tries a group of SURVIVING, or all others."""
    return surviving(workspace, name) if name in SURVIVING else refused(workspace)


if __name__ == "__main__":
    directory, *groups = sys.argv[1:]
    print(json.dumps({group: failures(str(Path(directory).absolute()), group) for group in groups}))
